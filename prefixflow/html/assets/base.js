// What every drawing uses: the data, the state, colours of the theme, figures as text, the tooltip.

const data = JSON.parse(document.getElementById("payload").textContent);
const element = (id) => document.getElementById(id);

// The one thing that is looked at: replica and pipeline rank; and the microbatch that is hovered or held.
const state = { replica: 0, rank: 0, focus: null, held: null };
const redraws = [];
const redrawAll = () => redraws.forEach((draw) => draw());

// Counts of what was drawn, on the root element, for tests and for whoever reads the page with a script.
const report = (name, count) => document.documentElement.setAttribute(`data-${name}`, count);

let colours = {};
function colour(name) {
  colours[name] ??= getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
  return colours[name];
}

const channels = (hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
function blend(from, to, share) {
  const end = channels(to);
  const mixed = channels(from).map((c, i) => Math.round(c + (end[i] - c) * share));
  return `#${mixed.map((c) => c.toString(16).padStart(2, "0")).join("")}`;
}
// Black or white, whichever reads better on `hex` (relative luminance of sRGB).
function inkOn(hex) {
  const [r, g, b] = channels(hex).map((c) => (c / 255) ** 2.2);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.18 ? "#10151b" : "#ffffff";
}

const count = (n) => n.toLocaleString("en");
const plural = (n, word, many = `${word}s`) => `${count(n)} ${n === 1 ? word : many}`;
function scaled(value, base, units) {
  const power = Math.min(units.length - 1, Math.max(0, Math.floor(Math.log(Math.max(value, 1)) / Math.log(base))));
  return `${(value / base ** power).toPrecision(3).replace(/e\+?\d+$/, "")} ${units[power]}`;
}
const bytes = (n) => scaled(n, 1024, ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]);
// Predicted cost: FLOPs of one pipeline rank, or seconds where the plan was made from measured costs.
const cost = (n) =>
  data.unit === "s" ? scaled(n * 1e6, 1000, ["µs", "ms", "s"]) : scaled(n, 1000, ["", "k", "M", "G", "T", "P", "E"]) + data.unit;
const percent = (share, digits = 1) => `${(100 * share).toFixed(digits)} %`;
const few = (names, most) => names.slice(0, most).join(", ") + (names.length > most ? `, … (${count(names.length)})` : "");

function showTip(event, lines) {
  const tip = element("tip");
  if (!lines) {
    tip.style.display = "none";
    return;
  }
  const [title, ...rest] = lines;
  const bold = document.createElement("b");
  bold.textContent = title;
  const parts = rest.map((line) => {
    const div = document.createElement("div");
    div.textContent = line;
    return div;
  });
  tip.replaceChildren(bold, ...parts);
  tip.style.display = "block";
  const x = Math.min(event.clientX + 16, innerWidth - tip.offsetWidth - 8);
  const below = event.clientY + 18;
  const y = below + tip.offsetHeight > innerHeight ? event.clientY - tip.offsetHeight - 12 : below;
  tip.style.left = `${Math.max(8, x)}px`;
  tip.style.top = `${Math.max(8, y)}px`;
}

// Legend entries: [colour or "hatched", text]; `shape` "dot" for marks.
function showLegend(id, entries) {
  const items = entries.map(([fill, text, shape]) => {
    const item = document.createElement("span");
    const swatch = document.createElement("i");
    if (fill === "hatched") swatch.className = "hatched";
    else swatch.style.background = fill;
    if (shape) swatch.classList.add(shape);
    item.append(swatch, text);
    return item;
  });
  element(id).replaceChildren(...items);
}

function button(text, title, onClick) {
  const made = document.createElement("button");
  made.type = "button";
  made.textContent = text;
  made.title = title;
  made.addEventListener("click", onClick);
  return made;
}

const sameFocus = (a, b) => a === b || (a && b && a.replica === b.replica && a.microbatch === b.microbatch);
const focused = () => state.focus ?? state.held;
function setFocus(focus) {
  if (sameFocus(state.focus, focus)) return;
  state.focus = focus;
  redrawAll();
}
function hold(focus) {
  state.held = sameFocus(state.held, focus) ? null : focus;
  redrawAll();
}
