// The page: asks /api/now every two seconds, /api/history when the span changes, /api/plans now and then. Read-only.

import { Chart, make } from "./chart.js";
import { bytes, clock, count, exact, percent, perSecond, rate, seconds, tier, words } from "./format.js";

const DEADLINE_MS = 8000, LONGEST_PAUSE_MS = 30000, PLANS_EVERY_S = 4, HISTORY_EVERY_S = 60, FINE_SPAN_S = 600;
const STALE_SAMPLES = 3;
const WINDOW = 40; // a rate is that of a fortieth of the span
const SPANS = { 600: "10 min", 3600: "1 h", 21600: "6 h", 86400: "24 h" };
const TIER_ORDER = ["hbm", "pinned", "nvme", "peer"];
const STATES = { ready: "ready", writing: "arriving", leaving: "leaving", limbo: "limbo", quarantined: "quarantined", free: "free" };
const STATE_COLORS = { writing: "var(--peer)", leaving: "var(--r4)", limbo: "var(--r3)", quarantined: "var(--r2)", free: "var(--free)" };
const OUTCOMES = { loaded: "good", fetching: "good", planned: "", recompute: "", partly: "warn", failed: "bad", cancelled: "warn" };

const page = { now: null, table: { at_s: [], series: {} }, spanS: 600, historyAt: -Infinity, plansAt: -Infinity, failures: 0 };
const $ = id => document.getElementById(id);
const body = id => document.querySelector(`#${id} > div`);
const color = name => TIER_ORDER.includes(name) ? `var(--${name})` : "var(--other)";
// New prompts grey; room warm; decisions pink, violet, blue; trouble red.
const REASONS = { never_stored: 1, tail: 8, being_written: 8, evicted: 3, declined: 5, not_granted: 5, dropped: 6, too_slow: 4, not_taken: 6, behind_gap: 6,
  computed_first: 7, failed: 2, damaged: 2, unreadable: 2, over_deadline: 2, cancelled: 9, unknown: 9 };
const reasonColor = (reason, index) => `var(--r${REASONS[reason] ?? 1 + index % 9})`;

const charts = {
  hits: new Chart($("chart-hits"), { title: "Where requested tokens came from", note: "share of all, by tier", format: percent, stacked: true, max: 1, empty: "No request has ended in this time." }),
  saved: new Chart($("chart-saved"), { title: "GPU time saved", note: "seconds a second", format: value => value === null ? "–" : value.toFixed(value < 10 ? 2 : 0), stacked: true }),
  missed: new Chart($("chart-missed"), { title: "Tokens missed, by reason", format: perSecond, stacked: true, empty: "None in this time." }),
  moved: new Chart($("chart-moved"), { title: "Bandwidth", note: "by tier and direction", format: rate, empty: "No transfer in this time." }),
  capacity: new Chart($("chart-capacity"), { title: "Hit rate by size of RAM", format: percent, max: 1, axis: {
    name: "RAM", along: "through sizes", text: bytes, place: Math.log2,
    ticks: (first, last, num) => {
      const step = Math.ceil(Math.log2(last / first) / num), sizes = [];
      for (let size = first; size <= last * 1.001; size *= 2 ** step) sizes.push(size);
      return sizes;
    },
  } }),
  removed: new Chart($("chart-removed"), { title: "Blocks given up", format: perSecond, stacked: true, empty: "None in this time." }),
};

// --- asking -------------------------------------------------------------------------------------------------------------

async function ask(path) {
  const answer = await fetch(path, { signal: AbortSignal.timeout(DEADLINE_MS), cache: "no-store" });
  if (!answer.ok) throw new Error(`${path}: ${answer.status}`);
  return answer.json();
}

async function poll() {
  const turn = page.turn = (page.turn ?? 0) + 1, mine = () => turn === page.turn; // one that was overtaken changes nothing
  let pause = 1000 * (page.now?.every_s ?? 2);
  try {
    const now = await ask("api/now");
    if (!mine()) return;
    page.now = now;
    page.failures = 0;
    const fresh = performance.now() / 1000;
    if (page.now.stats) {
      const stale = fresh - page.historyAt > (page.spanS === FINE_SPAN_S ? HISTORY_EVERY_S : HISTORY_EVERY_S / 4);
      const table = stale ? await ask(`api/history?span=${page.spanS}`) : append(page.table, page.now);
      if (!mine()) return;
      page.table = table;
      if (stale) page.historyAt = fresh;
      if (fresh - page.plansAt > PLANS_EVERY_S) { drawPlans((await ask("api/plans")).plans); page.plansAt = fresh; }
    }
  } catch (error) {
    if (!mine()) return;
    page.failures += 1;
    pause = Math.min(LONGEST_PAUSE_MS, pause * 2 ** page.failures);
  }
  draw();
  clearTimeout(page.timer);
  page.timer = setTimeout(poll, document.hidden ? LONGEST_PAUSE_MS : pause);
}

// The newest sample behind the history, as the server would have it. Series are the same: kvstore/figures.py.
function append(table, now) {
  if (now.at_s <= (table.at_s.at(-1) ?? 0)) return table;
  table.at_s.push(now.at_s);
  const names = new Set([...Object.keys(table.series), ...Object.keys(now.figures)]);
  for (const name of names) {
    const values = table.series[name] ??= Array(table.at_s.length - 1).fill(null);
    values.push(now.figures[name] ?? null);
  }
  while (table.at_s.length > 2 && table.at_s[0] < now.at_s - page.spanS - now.every_s) {
    table.at_s.shift();
    for (const values of Object.values(table.series)) values.shift();
  }
  return table;
}

// --- sums ---------------------------------------------------------------------------------------------------------------

const names = beginning => Object.keys(page.table.series).filter(name => name.startsWith(beginning));
const series = name => page.table.series[name] ?? page.table.at_s.map(() => null);

// For each sample the one that its rate begins at: a window before it, or the last before that.
function starts() {
  const at = page.table.at_s, windowS = Math.max(page.spanS / WINDOW, 4);
  let j = 0;
  return at.map((time, i) => {
    while (j + 1 < i && at[j + 1] <= time - windowS) j += 1;
    return i ? j : null;
  });
}

// Growth of a sum over the window of each sample; null before the first and over a restart.
function growth(name, from) {
  const values = series(name);
  return values.map((value, i) => {
    const before = from[i] === null ? null : values[from[i]] ?? (name === "requests" || name.includes(".") ? 0 : null);
    return value === null || before === null || value < before ? null : value - before;
  });
}

function rates(name, from) {
  const at = page.table.at_s;
  return growth(name, from).map((grown, i) => grown === null ? null : grown / (at[i] - at[from[i]]));
}

// Growth over the whole span that is there; from 0 where it begins with the sidecar's start.
function over(name) {
  const values = series(name).filter(value => value !== null);
  if (!values.length) return 0;
  let grown = 0;
  for (let i = 1; i < values.length; i++) grown += values[i] >= values[i - 1] ? values[i] - values[i - 1] : values[i];
  const missing = series(name).findIndex(value => value !== null) > 0;
  return grown + (missing ? values[0] : 0);
}

const byTier = (a, b) => (TIER_ORDER.indexOf(a) + 9) % 9 - (TIER_ORDER.indexOf(b) + 9) % 9;
const last = (name, beginning) => name.slice(beginning.length);

// --- drawing ------------------------------------------------------------------------------------------------------------

function draw() {
  const { now } = page, stats = now?.stats;
  drawLive();
  if (!stats) return;
  $("node").textContent = `${location.host} · kvstore ${stats.server_version} · up ${seconds(stats.uptime_s)} · boot ${stats.boot_id.slice(0, 8)}`;
  drawAlarms(now.alarms);
  drawTiles(stats);
  drawCharts();
  drawCapacity(stats);
  drawTiers(stats.tiers);
  drawPrefixes(now.hot_prefixes);
  drawTenants(stats.tenants);
  drawDrives(stats);
  drawPeers(stats.peers);
  drawQueues(stats);
  drawTotals(stats);
  const memory = page.table.memory_bytes ? `History takes ${bytes(page.table.memory_bytes)} of memory. ` : "";
  $("foot").textContent = `${memory}Everything here is on /metrics too, or told by kvstore explain.`;
}

function drawLive() {
  const { now, failures } = page;
  const age = now ? now.age_s : 0, late = now && (now.problem || age > STALE_SAMPLES * now.every_s);
  const [style, text] = failures ? ["bad", `No answer${now ? `, figures from ${clock(now.at_s, true)}` : ""}`]
    : late ? ["bad", `Stale: ${seconds(age)} old`] : now?.stats ? ["good", "Live"] : ["warn", "Waiting for the first sample"];
  const live = $("live");
  if (live.textContent !== text) live.textContent = text;
  live.className = `pill ${style}`;
  $("main").classList.toggle("stale", Boolean(failures || late));
  document.title = `${style === "good" ? "" : "⚠ "}${now?.alarms?.length ? `(${now.alarms.length}) ` : ""}kvstore`;
}

function drawAlarms(alarms) {
  const all = [...alarms];
  if (page.now.problem) all.unshift({ level: "critical", title: "The brain loop does not answer", why: page.now.problem, advice: "Engines compute meanwhile. Figures below are the last known." });
  const said = JSON.stringify(all);
  if (said === page.alarmsSaid) return; // a live region speaks when it changes
  page.alarmsSaid = said;
  $("alarms").replaceChildren(...all.length ? all.map(({ level, title, why, advice }) => make("div", { class: `alarm ${level === "critical" ? "bad" : "warn"}` },
    make("b", {}, level), make("strong", {}, title), make("p", {}, why, " ", make("span", { class: "dim" }, advice))))
    : [make("p", { class: "clear" }, "No alarms.")]);
}

function tile(title, value, unit, sub, ...more) {
  return make("article", { class: "tile" }, make("h2", {}, title), ...more,
    make("p", { class: "value" }, value, unit ? make("small", {}, ` ${unit}`) : null), make("p", { class: "sub" }, sub));
}

function drawTiles(stats) {
  const span = SPANS[page.spanS], requested = over("tokens.requested"), requests = over("requests");
  const hits = names("tokens.hit.").map(name => [last(name, "tokens.hit."), over(name)]).sort((a, b) => byTier(a[0], b[0]));
  const hit = hits.reduce((sum, [, tokens]) => sum + tokens, 0);
  const saved = over("saved_s"), sooner = saved - over("fetch.actual_s");
  const first = tile("Hit rate", requested ? percent(hit / requested) : "–", "", requested
    ? `${count(hit)} of ${count(requested)} tokens requested in ${span} were not computed` : `No request has ended in ${span}.`);
  first.classList.add("first");
  first.insertBefore(make("div", { class: "bar", role: "img", "aria-label": hits.map(([name, tokens]) => `${tier(name)} ${percent(requested ? tokens / requested : null)}`).join(", ") },
    ...hits.map(([name, tokens]) => make("i", { vars: { "--c": color(name), "--w": `${requested ? 100 * tokens / requested : 0}%` } }))), first.lastChild);
  const fetches = stats.predictions.find(each => each.kind === "fetch");
  const held = stats.tiers.filter(each => each.name !== "hbm").reduce((sum, each) => sum + each.ready_bytes, 0);
  const spanNow = page.table.at_s.length > 1 ? page.table.at_s.at(-1) - page.table.at_s[0] : 0;
  $("tiles").replaceChildren(first,
    tile("GPU time saved", seconds(saved), "", spanNow ? `in ${span}: as if ${(saved / spanNow).toFixed(2)} more GPUs` : `in ${span}`),
    tile("TTFT saved", requests ? seconds(Math.max(0, sooner) / requests) : "–", "", `mean of ${count(requests)} requests, fetching counted`),
    tile("Held", bytes(held), "", [[stats.num_blocks, "block"], [stats.num_leases, "lease"], [stats.num_sessions, "session"]].map(([num, what]) => `${count(num)} ${what}${num === 1 ? "" : "s"}`).join(" · ")));
  const mean = kind => seconds((stats.seconds[`${kind}_fetch`] ?? 0) / fetches.num);
  const speed = fetches?.num ? `a fetch takes ${mean("actual")}, ${mean("predicted")} predicted` : "nothing was fetched so far";
  $("tiles").children[2].lastChild.textContent += `; ${speed}`;
}

function drawCharts() {
  const at = page.table.at_s, from = starts(), requested = growth("tokens.requested", from);
  const share = name => growth(name, from).map((tokens, i) => requested[i] && tokens !== null ? Math.min(1, tokens / requested[i]) : null);
  charts.hits.update(at, names("tokens.hit.").sort((a, b) => byTier(last(a, "tokens.hit."), last(b, "tokens.hit.")))
    .map(name => ({ label: tier(last(name, "tokens.hit.")), color: color(last(name, "tokens.hit.")), values: share(name) })));
  charts.saved.update(at, [{ label: "saved", color: "var(--good)", values: rates("saved_s", from) }]);
  const grown = beginning => names(beginning).sort((a, b) => (series(b).at(-1) ?? 0) - (series(a).at(-1) ?? 0)).map(name => [last(name, beginning), rates(name, from)]).filter(([, values]) => values.some(value => value));
  charts.missed.update(at, grown("tokens.missed.").map(([reason, values]) => ({ label: words(reason), title: page.table.misses?.[reason], color: reasonColor(reason, names("tokens.missed.").indexOf(`tokens.missed.${reason}`)), values })));
  charts.moved.update(at, grown("moved.").map(([name, values]) => {
    const [where, direction] = name.split(".");
    return { label: `${tier(where)} ${direction ?? ""}`, color: color(where), dashed: direction === "write", values };
  }));
  charts.removed.update(at, grown("removed.").map(([name, values], i) => {
    const [where, reason] = name.split(".");
    return { label: `${reason} from ${tier(where)}`, color: reason === "evicted" ? color(where) : reasonColor(reason, i + 1), values };
  }));
}

// What other sizes of RAM would have hit of the tokens asked for lately (kvstore/live_curve.py).
function drawCapacity({ capacity_curve: curve }) {
  const sizes = curve.bytes, of = Object.fromEntries(curve.capacities.map(each => [each.capacity, each]));
  charts.capacity.note.textContent = curve.words.replaceAll(" %", "\u202f%");
  if (!curve.requested_tokens || !sizes.length) { charts.capacity.update(sizes, []); return; }
  const nearest = sizes.reduce((best, size, i) => Math.abs(Math.log2(size / of["1x"].bytes)) < Math.abs(Math.log2(sizes[best] / of["1x"].bytes)) ? i : best, 0);
  const marks = [["1x", "RAM now"], ["drives", "drives"]].filter(([name]) => of[name]).map(([name, label]) => ({ at: of[name].bytes, label }));
  charts.capacity.update(sizes, [
    { label: "with so much RAM", color: "var(--pinned)", values: curve.hit_rates },
    { label: "without end", title: "everything that was used in a day", color: "var(--other)", dashed: true, values: sizes.map(() => of.endless.hit_rate) },
  ], { marks, home: nearest });
}

function drawTiers(tiers) {
  body("tiers").replaceChildren(...tiers.map(each => {
    const used = each.capacity_bytes - each.free_bytes, share = state => each.capacity_bytes ? each[`${state}_bytes`] / each.capacity_bytes : 0;
    const said = Object.keys(STATES).filter(state => each[`${state}_bytes`]).map(state => `${STATES[state]} ${bytes(each[`${state}_bytes`])}`).join(", ");
    return make("div", { class: "tier" }, make("b", {}, tier(each.name)),
      make("div", { class: "bar", role: "img", "aria-label": said, title: said }, ...Object.keys(STATES).filter(state => state !== "free" && each[`${state}_bytes`]).map(state =>
        make("i", { vars: { "--c": state === "ready" ? color(each.name) : STATE_COLORS[state], "--w": `${100 * share(state)}%` } }))),
      make("span", { class: "amount" }, make("b", {}, percent(each.capacity_bytes ? used / each.capacity_bytes : null)), ` of ${bytes(each.capacity_bytes)} · ${count(each.ready_blocks)} blocks`));
  }), make("ul", { class: "legend" }, ...Object.entries(STATES).map(([state, label]) => make("li", {},
    make("span", { class: "swatch", vars: { "--c": state === "ready" ? "var(--pinned)" : STATE_COLORS[state] }, "aria-hidden": "true" }),
    make("span", { class: "name" }, label), make("b", {}, bytes(tiers.reduce((sum, each) => sum + each[`${state}_bytes`], 0)))))));
}

function drawPlans(plans) {
  if (!plans.length) { body("plans").replaceChildren(make("p", { class: "none" }, "Nothing has been planned yet.")); return; }
  const list = make("div", { class: "plans", tabindex: "0", role: "region", "aria-label": "Decisions, newest first" });
  list.append(...plans.map(each => {
    const longest = Math.max(each.plan.total_s, each.plan.recompute_s, each.actual_s, 1e-9);
    const time = (label, value, c) => value ? [make("span", {}, label), make("span", { class: "bar" }, make("i", { vars: { "--c": c, "--w": `${100 * value / longest}%` } })), make("b", {}, seconds(value))] : [];
    return make("article", { class: "plan" },
      make("div", { class: "side" }, make("span", { class: `pill ${OUTCOMES[each.outcome] ?? ""}` }, each.outcome), make("span", { class: "dim" }, `${seconds(each.age_s)} ago`)),
      make("p", {}, make("code", {}, each.request_id.length > 20 ? `${each.request_id.slice(0, 19)}…` : each.request_id), each.wish.label ? ` ${each.wish.label} ` : " ", make("span", { class: "dim" }, each.words)),
      make("div", { class: "times" }, ...time("computed", each.plan.recompute_s, "var(--r1)"), ...time("planned", each.plan.total_s, "var(--pinned)"), ...time("load took", each.actual_s, "var(--good)")));
  }));
  const top = body("plans").firstChild?.scrollTop ?? 0;
  if (top === 0) body("plans").replaceChildren(list); // somebody who reads further down is not interrupted
}

// rows: [[cell, ...], ...]; a column: [title, class]
function drawTable(id, columns, rows, none) {
  if (!rows.length) { body(id).replaceChildren(make("p", { class: "none" }, none)); return; }
  const head = make("tr", {}, ...columns.map(([title, style]) => make("th", { scope: "col", class: style }, title)));
  const lines = rows.map(row => make("tr", {}, ...row.map((cell, i) => make(i ? "td" : "th", { class: columns[i][1], scope: i ? null : "row" }, cell))));
  const scroll = make("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": $(id).querySelector("h2").textContent }, make("table", {}, make("thead", {}, head), make("tbody", {}, ...lines)));
  const kept = body(id).firstChild, left = kept?.scrollLeft ?? 0, focused = kept && kept === document.activeElement;
  body(id).replaceChildren(scroll);
  scroll.scrollLeft = left;
  if (focused) scroll.focus({ preventScroll: true });
}

const share = (value, c) => make("span", { class: "bar", role: "img", "aria-label": percent(value) }, make("i", { vars: { "--c": c, "--w": `${100 * value}%` } }));
const state = name => make("span", { class: `pill ${name === "ready" ? "good" : name === "recovering" || name === "probing" ? "warn" : "bad"}` }, name);
const hash = text => make("code", { title: text }, text.slice(0, 10));

function drawPrefixes(prefixes) {
  drawTable("prefixes", [["Last block"], ["Label"], ["Tokens", "number"], ["Read", "number"], ["Saved", "number"], ["Tenant", "second"], ["Held", "second"], ["Namespace", "third second"], ["Weights", "third second"]],
    prefixes.map(each => {
      const held = Object.entries(each.ready_blocks).filter(([, blocks]) => blocks).map(([name, blocks]) => `${tier(name)} ${percent(blocks / each.num_blocks)}`);
      return [hash(each.key), each.label || "–", exact(each.num_blocks * each.block_tokens), `${count(each.hits)}\u2009×`, count(each.hits * each.num_blocks * each.block_tokens),
        each.tenant || "–", held.join(", ") || "gone", hash(each.namespace), make("code", { title: each.model }, each.model.length > 22 ? `${each.model.slice(0, 21)}…` : each.model)];
    }), "No block was read yet.");
}

function drawTenants(tenants) {
  const asked = [...tenants].sort((a, b) => b.usage.requested_tokens - a.usage.requested_tokens);
  drawTable("tenants", [["Tenant"], ["Hit rate"], ["Requested", "number"], ["Requests", "number third second"], ["Held", "number"], ["Most missed for", "third second"]],
    asked.map(({ tenant, usage, held_bytes: held }) => {
      const hit = Object.values(usage.hit_tokens).reduce((sum, tokens) => sum + tokens, 0), part = usage.requested_tokens ? hit / usage.requested_tokens : 0;
      const worst = Object.entries(usage.missed_tokens).filter(([, tokens]) => tokens).sort((a, b) => b[1] - a[1])[0];
      return [tenant, make("span", { class: "rate" }, share(part, "var(--pinned)"), percent(part)), count(usage.requested_tokens), exact(usage.num_requests),
        bytes(Object.values(held).reduce((sum, each) => sum + each, 0)), worst ? `${words(worst[0])}, ${count(worst[1])} tokens` : "–"];
    }), "No request has ended yet.");
}

function drawDrives(stats) {
  const budget = stats.write_budget, drives = stats.tiers.flatMap(each => each.drives);
  drawTable("drives", [["Drive"], ["State"], ["Size", "number"], ["Why", "wrap"]], drives.map(each => [make("code", {}, each.path), state(each.state), bytes(each.capacity_bytes), each.reason || "–"]), "No drives: blocks are kept in RAM only.");
  if (drives.length && budget) {
    const limit = budget.bytes_per_day ? ` · ${bytes(budget.day_bytes)} of ${bytes(budget.bytes_per_day)} in 24 hours` : "";
    body("drives").append(make("p", { class: "none" }, `${words(budget.policy || "written")}: ${bytes(budget.written_bytes)} written since start${limit}`));
  }
}

function drawPeers(peers) {
  drawTable("peers", [["Node"], ["State"], ["Fetched", "number"], ["Bandwidth", "number"], ["Latency", "number"], ["Queued", "number third second"], ["Links", "second"], ["Address", "third second"]],
    peers.map(each => [each.node_id, state(each.state), bytes(each.fetched_bytes), rate(each.bytes_per_s || null), seconds(each.latency_s || null), bytes(each.queued_bytes), each.links.join(", ") || "none in common", make("code", {}, each.address)]),
    "No other nodes: this sidecar stands alone.");
}

function drawQueues(stats) {
  const rows = stats.queues.map(each => [words(each.queue), each.limit ? `${exact(each.length)} of ${count(each.limit)}` : exact(each.length), each.limit ? share(Math.min(1, each.length / each.limit), "var(--nvme)") : ""]);
  drawTable("queues", [["Queue"], ["Waiting", "number"], [""]], rows, "No queues to show.");
  body("queues").append(make("p", { class: "none" }, `Loop at most ${seconds(stats.loop_lag_s)} late in ten seconds · ${exact(stats.num_open_requests)} requests open · ${exact(stats.num_namespaces)} namespaces · leases in limbo: ${exact(stats.num_expired_leases)}`));
}

function drawTotals(stats) {
  const { usage, counters } = stats;
  const rows = [["requests", "kvstore_requests", usage.num_requests], ["tokens requested", "kvstore_requested_tokens", usage.requested_tokens],
    ...Object.entries(usage.hit_tokens).sort((a, b) => byTier(a[0], b[0])).map(([name, tokens]) => [`hit: ${tier(name)}`, `kvstore_hit_tokens|${name}`, tokens]),
    ...Object.entries(usage.missed_tokens).sort().map(([reason, tokens]) => [`missed: ${words(reason)}`, `kvstore_missed_tokens|${reason}`, tokens]),
    ...["stored", "acquired", "evicted", "nvme_evicted", "promoted", "demoted", "fetched"].map(name => [`blocks ${words(name)}`, `kvstore_${name}_blocks`, counters[`${name}_blocks_total`]])];
  body("totals").replaceChildren(make("dl", { class: "totals" }, ...rows.filter(([, , value]) => value !== undefined).map(([label, metric, value]) =>
    make("div", {}, make("dt", {}, label), make("dd", { "data-metric": metric, "data-value": value }, exact(value))))));
}

// --- controls -----------------------------------------------------------------------------------------------------------

function chooseSpan(spanS) {
  page.spanS = spanS;
  page.historyAt = -Infinity;
  for (const button of $("spans").children) button.setAttribute("aria-pressed", String(Number(button.value) === spanS));
}

$("spans").append(...Object.entries(SPANS).map(([value, label]) => make("button", { type: "button", value }, label)));
$("spans").addEventListener("click", event => {
  if (event.target.value) { chooseSpan(Number(event.target.value)); clearTimeout(page.timer); poll(); }
});
const dark = () => (document.documentElement.dataset.theme ?? (matchMedia("(prefers-color-scheme: light)").matches ? "light" : "dark")) === "dark";
const nameTheme = () => { $("theme").textContent = dark() ? "Light" : "Dark"; $("theme").setAttribute("aria-label", `Switch to ${dark() ? "light" : "dark"} colours`); };
$("theme").addEventListener("click", () => {
  const theme = dark() ? "light" : "dark";
  document.documentElement.dataset.theme = theme;
  localStorage.setItem("kvstore-theme", theme);
  nameTheme();
});
matchMedia("(prefers-color-scheme: light)").addEventListener("change", nameTheme);
document.addEventListener("visibilitychange", () => { if (!document.hidden) { clearTimeout(page.timer); poll(); } });
nameTheme();
chooseSpan(600);
poll();
