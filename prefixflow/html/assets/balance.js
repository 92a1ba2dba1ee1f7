// Loads of the replicas, and how the pipeline ranks of the chosen one spend the step.

const SHARES = [
  ["AF", "A, prefix forward"],
  ["BF", "B, suffix forward"],
  ["BB", "B, suffix backward"],
  ["CB", "C, prefix backward"],
  ["gap", "dummies"],
];

function row(name, parts, figure, mark) {
  const made = document.createElement("div");
  made.className = "row";
  const [label, track, text] = ["name", "track", "figure"].map((kind) => {
    const part = document.createElement("span");
    part.className = kind;
    return part;
  });
  label.textContent = name;
  text.textContent = figure;
  for (const [fill, share] of parts) {
    const piece = document.createElement("i");
    piece.style.width = `${100 * share}%`;
    piece.style.background = fill;
    track.append(piece);
  }
  if (mark !== undefined) track.append(Object.assign(document.createElement("u"), { style: `left:${100 * mark}%` }));
  made.append(label, track, text);
  return made;
}

function showLoads() {
  const loads = data.replicas.map((r) => r.load);
  const most = loads.reduce((a, b) => Math.max(a, b), 0) || 1;
  const mean = loads.reduce((a, b) => a + b, 0) / loads.length;
  const rows = data.replicas.map((r, index) => {
    const ratio = mean ? `${(r.load / mean).toFixed(3)} × mean` : "no work";
    const figure = `${ratio}, ${plural(r.trees, "tree")}, ${count(r.tokens)} tokens`;
    const made = row(`replica ${index}`, [[colour("AF"), r.load / most]], figure, mean / most);
    const outer = button("", `${cost(r.load)}, ${count(r.microbatches)} microbatches`, () => selectReplica(index));
    outer.className = "row";
    outer.append(...made.children);
    outer.disabled = !r.rows;
    outer.setAttribute("aria-pressed", index === state.replica);
    return outer;
  });
  element("loads").replaceChildren(...rows);
  report("replicas", rows.length);
}

function showShares() {
  const rows = timeline().rows.map((operations, rank) => {
    const sums = Object.fromEntries(SHARES.map(([name]) => [name, 0]));
    for (const op of operations) sums[op.isDummy ? "gap" : op.colour] += op.stop - op.start;
    const parts = SHARES.map(([name]) => [colour(name), sums[name] / data.ticks]);
    const busy = Object.values(sums).reduce((a, b) => a + b, 0) / data.ticks;
    const made = row(`rank ${rank}`, parts, `${percent(busy)} busy`);
    made.querySelector(".track").classList.add("hatched");
    made.title = SHARES.map(([name, text]) => `${text}: ${percent(sums[name] / data.ticks)}`).join("\n");
    return made;
  });
  element("shares").replaceChildren(...rows);
}
