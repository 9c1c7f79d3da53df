// Numbers as people read them. What is not known is a dash.

const scaled = (value, step, units) => {
  let unit = 0;
  while (Math.abs(value) >= step && unit < units.length - 1) { value /= step; unit += 1; }
  const digits = Math.abs(value) >= 100 || unit === 0 && Number.isInteger(value) ? 0 : Math.abs(value) >= 10 ? 1 : 2;
  return [value.toFixed(digits).replace(/(\.\d*?)0+$/, "$1").replace(/\.$/, ""), units[unit]];
};
const known = value => value !== null && value !== undefined && Number.isFinite(value);

export const count = value => known(value) && Math.abs(value) < 10000 && Number.isInteger(value) ? value.toLocaleString("en-US") : known(value) ? scaled(value, 1000, ["", "k", "M", "G", "T"]).join("\u2009").trim() : "–";
export const exact = value => known(value) ? Math.round(value).toLocaleString("en-US") : "–";
export const bytes = value => known(value) ? scaled(value, 1024, ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]).join("\u2009") : "–";
export const rate = value => known(value) ? scaled(value, 1000, ["B/s", "kB/s", "MB/s", "GB/s", "TB/s"]).join("\u2009") : "–";
export const perSecond = value => known(value) ? `${scaled(value, 1000, ["", "\u2009k", "\u2009M", "\u2009G"]).join("")}/s` : "–";
export const percent = value => known(value) ? `${(100 * value).toFixed(Math.abs(value) < 0.0995 && value ? 1 : 0)}\u2009%` : "–";

export function seconds(value) {
  if (!known(value)) return "–";
  const size = Math.abs(value);
  if (size < 0.0995) return `${(1000 * value).toFixed(size < 0.00995 ? 1 : 0)}\u2009ms`;
  if (size < 9.95) return `${value.toFixed(2)}\u2009s`;
  if (size < 119.5) return `${value.toFixed(0)}\u2009s`;
  if (size < 7200) return `${Math.round(value / 60)}\u2009min`;
  const hours = Math.floor(size / 3600);
  if (size < 172800) return `${Math.sign(value) * hours}\u2009h ${Math.round(size % 3600 / 60)}\u2009min`;
  return `${Math.round(value / 86400)}\u2009days`;
}

export const clock = (at, withSeconds) => new Date(1000 * at).toLocaleTimeString("en-GB",
  withSeconds ? {} : { hour: "2-digit", minute: "2-digit" });

export const words = name => name.replaceAll("_", " ");

const TIERS = { pinned: "RAM", nvme: "NVMe", peer: "other nodes", hbm: "engine's own" };
export const tier = name => TIERS[name] ?? name;
