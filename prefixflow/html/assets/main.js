// Choose what is looked at, and draw.

function selectReplica(replica) {
  if (replica === state.replica) return;
  state.replica = replica;
  state.rank = largestRank();
  showBalance();
  redrawAll();
}

function selectRank(rank) {
  state.rank = rank;
  redrawAll();
}

function showBalance() {
  showLoads();
  showShares();
  const { rows, operations } = data.replicas[state.replica];
  const drawn = rows.reduce((sum, flat) => sum + flat.length / OPERATION_WIDTH, 0);
  element("schedule-of").textContent = data.replicas.length > 1 ? `of replica ${state.replica}` : "";
  const rest = drawn < operations ? ` Drawn: the first ${count(drawn)} of ${count(operations)} operations.` : "";
  element("schedule-note").textContent = `All of it: ${cost(data.stepCost)} on one pipeline rank of the slowest replica.${rest}`;
}

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  colours = {};
  element("theme").textContent = theme === "dark" ? "Light" : "Dark";
  showBalance();
  redrawAll();
}

// What an address may ask for: page.html#theme=dark&replica=1&rank=2
function fromAddress() {
  const asked = new URLSearchParams(location.hash.slice(1));
  const slowest = data.replicas.reduce((best, r, i) => (r.makespan > data.replicas[best].makespan ? i : best), 0);
  const replica = Number(asked.get("replica") ?? slowest);
  state.replica = data.replicas[replica]?.rows ? replica : slowest;
  const rank = Number(asked.get("rank") ?? largestRank());
  state.rank = rank in data.replicas[state.replica].rows ? rank : largestRank();
  return asked.get("theme");
}

const prefersDark = matchMedia("(prefers-color-scheme: dark)");
const asked = fromAddress();
startForest();
startTimeline();
startMemory();
setTheme(asked ?? (prefersDark.matches ? "dark" : "light"));
prefersDark.addEventListener("change", () => setTheme(prefersDark.matches ? "dark" : "light"));
element("theme").addEventListener("click", () => setTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark"));
addEventListener("resize", redrawAll);
addEventListener("keydown", (event) => {
  if (event.key !== "Escape") return;
  state.held = null;
  setFocus(null);
  redrawAll();
});
report("ready", 1);
