// One chart: areas or lines over an axis (time, or what else is given), a legend that tells the values under the cursor, a table
// behind it. Pointer, touch, or arrow keys move the cursor; away from it the newest values stand there, or those of `home`.

import { clock } from "./format.js";

const SVG = "http://www.w3.org/2000/svg";

// An axis: how its values read, where they lie, which are marked, and what moving along it is called.
const TIME = {
  name: "Time", along: "through time", text: clock, place: at => at,
  ticks: (first, last, num) => Array.from({ length: num + 1 }, (_, i) => first + i / num * (last - first)),
};
const HEIGHT = 190, TOP = 10, BOTTOM = 22, TABLE_ROWS = 12;

export function make(tag, attributes = {}, ...children) {
  const element = tag.startsWith("svg:") ? document.createElementNS(SVG, tag.slice(4)) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === false || value === null || value === undefined) continue;
    if (name === "vars") for (const [key, each] of Object.entries(value)) element.style.setProperty(key, each);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter(child => child !== null && child !== undefined));
  return element;
}

// A scale that ends at 1, 2, 2.5 or 5 times a power of ten (or of two, for bytes' sake decimals do).
function niceMax(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 1.5, 2, 3, 4, 5, 6, 8, 10].map(step => step * power).find(step => step >= value * 0.999);
}

export class Chart {
  constructor(figure, { title, note, format, stacked = false, max = null, axis = TIME, empty = "Nothing so far." }) {
    Object.assign(this, { figure, title, format, stacked, fixedMax: max, axis, empty });
    this.data = { at: [], series: [], marks: [] };
    this.cursor = null;
    this.note = make("p", { class: "dim" }, note ?? "");
    this.caption = make("figcaption", {}, make("h2", {}, title), this.note);
    this.legend = make("ul", { class: "legend" });
    this.when = make("p", { class: "when dim" });
    this.svg = make("svg:svg", { tabindex: "0", role: "img" });
    this.table = make("table");
    const details = make("details", {}, make("summary", {}, "As a table"), make("div", { class: "scroll", tabindex: "0" }, this.table));
    details.addEventListener("toggle", () => this.drawTable());
    this.details = details;
    figure.append(this.caption, this.svg, this.legend, this.when, details);
    new ResizeObserver(() => this.draw()).observe(figure);
    this.svg.addEventListener("pointermove", event => this.point(event));
    this.svg.addEventListener("pointerleave", () => this.moveTo(null));
    this.svg.addEventListener("blur", () => this.moveTo(null));
    this.svg.addEventListener("keydown", event => this.key(event));
  }

  // series: [{ label, title, color, dashed, values }], values as long as at; a title says more of the label. marks: [{ at, label }],
  // places on the axis that have a name; home: the index whose values stand in the legend
  update(at, series, { marks = [], home = at.length - 1 } = {}) {
    this.data = { at, series, marks };
    this.home = home;
    if (this.cursor !== null) this.cursor = Math.min(this.cursor, at.length - 1);
    this.draw();
  }

  draw() {
    const width = Math.max(240, this.figure.clientWidth - 36), { at, series, marks } = this.data;
    const plot = HEIGHT - TOP - BOTTOM;
    const layers = this.layers();
    const top = this.fixedMax ?? niceMax(Math.max(0, ...layers.flatMap(layer => layer.map(pair => pair?.[1] ?? 0))));
    const first = at[0], last = at[at.length - 1], { place } = this.axis;
    const across = value => last > first ? width * (place(value) - place(first)) / (place(last) - place(first)) : width;
    this.x = index => across(at[index]);
    const y = value => TOP + plot * (1 - Math.min(value, top) / top);
    const parts = [], ticks = [];
    for (const share of [0, 0.5, 1]) {
      parts.push(make("svg:line", { class: share ? "grid" : "grid base", x1: 0, x2: width, y1: y(share * top), y2: y(share * top) }));
      if (share) ticks.push(make("svg:text", { class: "tick", x: 0, y: y(share * top) + (share === 1 ? 11 : -4) }, this.format(share * top)));
    }
    if (last > first) {
      const num = Math.max(2, Math.min(6, Math.floor(width / 110)));
      for (const value of this.axis.ticks(first, last, num)) {
        const x = across(value);
        parts.push(make("svg:text", {
          class: "tick", x, y: HEIGHT - 6, "text-anchor": x < 24 ? "start" : x > width - 24 ? "end" : "middle",
        }, this.axis.text(value, last - first < 300)));
      }
      for (const { at: value, label } of marks) {
        const x = across(value), right = x < width / 2;
        parts.push(make("svg:line", { class: "mark-line", x1: x, x2: x, y1: TOP, y2: TOP + plot }));
        ticks.push(make("svg:text", { class: "tick", x: x + (right ? 5 : -5), y: TOP + plot - 6, "text-anchor": right ? "start" : "end" }, label));
      }
    }
    layers.forEach((layer, number) => {
      const style = { vars: { "--c": series[number].color }, class: this.stacked ? "area" : series[number].dashed ? "line dashed" : "line" };
      const path = this.stacked ? areaPath(layer, this.x, y) : linePath(layer, this.x, y);
      if (path) parts.push(make("svg:path", { d: path, ...style }));
      if (this.stacked && path) parts.push(make("svg:path", { d: linePath(layer, this.x, y), class: "line thin", vars: style.vars }));
    });
    if (!series.length || at.length < 2) {
      parts.push(make("svg:text", { class: "empty", x: width / 2, y: HEIGHT / 2, "text-anchor": "middle" }, at.length < 2 ? "Waiting for samples…" : this.empty));
    }
    this.cross = make("svg:line", { class: "cross", y1: TOP, y2: TOP + plot, x1: 0, x2: 0, visibility: "hidden" });
    this.svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    this.svg.setAttribute("width", width);
    this.svg.setAttribute("height", HEIGHT);
    this.svg.replaceChildren(...parts, ...ticks, this.cross);
    this.width = width;
    this.tell();
    if (this.details.open) this.drawTable();
  }

  // For each series [from, to] at each sample, or null where it is not known.
  layers() {
    const base = this.data.at.map(() => 0);
    return this.data.series.map(({ values }) => values.map((value, i) => {
      if (value === null) return null;
      if (!this.stacked) return [0, value];
      base[i] += value;
      return [base[i] - value, base[i]];
    }));
  }

  tell() {
    const { at, series } = this.data, index = this.cursor ?? this.home;
    const items = series.map(({ label, title, color, dashed, values }) => make("li", { title },
      make("span", { class: dashed ? "swatch dashed" : "swatch", vars: { "--c": color }, "aria-hidden": "true" }), make("span", { class: "name" }, label), " ",
      make("b", {}, this.format(values[index] ?? null))));
    this.legend.replaceChildren(...items);
    const said = series.map(({ label, values }) => `${label} ${this.format(values[index] ?? null)}`).join(", ");
    this.svg.setAttribute("aria-label", `${this.title}${at.length ? ` at ${this.axis.text(at[index], true)}` : ""}: ${said || this.empty} Arrow keys move ${this.axis.along}.`);
    this.when.textContent = this.cursor === null ? "" : this.axis.text(at[index], true);
    if (this.cross) {
      const shown = this.cursor !== null && at.length > 1;
      this.cross.setAttribute("visibility", shown ? "visible" : "hidden");
      if (shown) for (const end of ["x1", "x2"]) this.cross.setAttribute(end, this.x(index));
    }
  }

  moveTo(index) {
    this.cursor = index;
    this.tell();
  }

  point(event) {
    const { at } = this.data;
    if (at.length < 2) return;
    const box = this.svg.getBoundingClientRect(), place = (event.clientX - box.left) / box.width * this.width;
    let best = 0;
    for (let i = 1; i < at.length; i++) if (Math.abs(this.x(i) - place) < Math.abs(this.x(best) - place)) best = i;
    this.moveTo(best);
  }

  key(event) {
    const end = this.data.at.length - 1, now = this.cursor ?? this.home;
    const to = { ArrowLeft: now - 1, ArrowRight: now + 1, Home: 0, End: end, PageUp: now - 20, PageDown: now + 20, Escape: null }[event.key];
    if (to === undefined || end < 1) return;
    event.preventDefault();
    this.moveTo(to === null ? null : Math.max(0, Math.min(end, to)));
  }

  drawTable() {
    if (!this.details.open) return;
    const { at, series } = this.data, step = Math.max(1, Math.ceil(at.length / TABLE_ROWS));
    const rows = [];
    for (let i = at.length - 1; i >= 0; i -= step) {
      rows.push(make("tr", {}, make("th", { scope: "row" }, this.axis.text(at[i], true)), ...series.map(({ values }) => make("td", {}, this.format(values[i])))));
    }
    this.table.replaceChildren(
      make("caption", { class: "hidden" }, this.title),
      make("thead", {}, make("tr", {}, make("th", { scope: "col" }, this.axis.name), ...series.map(({ label }) => make("th", { scope: "col" }, label)))),
      make("tbody", {}, ...rows));
  }
}

function runs(layer) {
  const found = [];
  let run = [];
  layer.forEach((pair, i) => {
    if (pair !== null) run.push([i, pair]);
    else if (run.length) { found.push(run); run = []; }
  });
  return run.length ? [...found, run] : found;
}

const point = (x, y) => `${x.toFixed(1)} ${y.toFixed(1)}`;

function linePath(layer, x, y) {
  return runs(layer).map(run => "M" + run.map(([i, [, to]]) => point(x(i), y(to))).join("L")).join("");
}

function areaPath(layer, x, y) {
  return runs(layer).filter(run => run.length > 1).map(run => "M" + run.map(([i, [, to]]) => point(x(i), y(to))).join("L")
    + "L" + run.toReversed().map(([i, [from]]) => point(x(i), y(from))).join("L") + "Z").join("");
}
