// Draws the bars of each idea for the situation that the sliders say, and the recorded run that is nearest to it; the
// formulas are those of formulas.js, the runs those of runs.js.
const sliders = [...document.querySelectorAll("#situation input")];
const byName = Object.fromEntries(sliders.map((slider) => [slider.name, slider]));

function number(value) {
  return value >= 100 ? value.toFixed(0) : value.toPrecision(3);
}

function seconds(value) {
  return value >= 1 ? `${number(value)} s` : `${number(1000 * value)} ms`;
}

function situation() {
  const said = {};
  for (const slider of sliders) {
    const placed = slider.dataset.log === "1" ? 10 ** Number(slider.value) : Number(slider.value);
    const value = slider.dataset.whole === "1" ? Math.round(placed) : placed;
    said[slider.name] = value;
    const shown = slider.dataset.whole === "1" ? value : number(value);
    slider.parentElement.querySelector("output").textContent = `${shown} ${slider.dataset.unit}`;
  }
  return said;
}

// How far a slider stands from a value: 1 is as far as still counts as the same.
function distance(name, one, other) {
  if (byName[name].dataset.log === "1") return Math.abs(Math.log(one / other)) / Math.log(CLOSE);
  return Math.abs(one - other) / CLOSE_SHARE;
}

// The run that is nearest to all sliders together, and whether each of them stands where it did then.
function nearest(idea, said) {
  const found = RUNS[idea].map((run) => {
    const apart = Object.entries(run.at).map(([name, value]) => distance(name, said[name], value));
    return { run, far: apart.reduce((sum, one) => sum + one), here: Math.max(...apart) <= 1 };
  });
  return found.reduce((best, one) => (one.far < best.far ? one : best));
}

// The titles of the sliders that stand outside what was measured with the idea.
function outside(idea, said) {
  const names = Object.entries(RANGES[idea]).filter(([name, [least, most]]) => {
    const value = said[name];
    return (value < least || value > most) && distance(name, value, value < least ? least : most) > 1;
  });
  return names.map(([name]) => byName[name].parentElement.firstChild.textContent.trim());
}

function drawRun(section, { run, here }, longest) {
  for (const kind of ["without", "with"]) {
    const dot = section.querySelector(`.track.${kind} i`);
    dot.hidden = run[kind] > longest;
    dot.style.left = `${(100 * run[kind]) / longest}%`;
    dot.className = here ? "here" : "";
  }
  const times = `${seconds(run.without)} without, ${seconds(run.with)} with it`;
  const told = `${times} (n = ${run.n}, ${run.machine})`;
  section.querySelector(".run span").textContent = here ? `Recorded here: ${told}.` : `Recorded with other settings: ${told}.`;
  const link = section.querySelector(".run a");
  link.textContent = `Notebook ${run.notebook}`;
  link.href = PAGES[run.notebook];
}

function draw() {
  const said = situation();
  for (const section of document.querySelectorAll("#bars section")) {
    const idea = section.dataset.idea;
    const [without, withIt] = IDEAS[idea](said);
    const found = nearest(idea, said);
    const dots = found.here ? [found.run.without, found.run.with] : [];
    const longest = Math.max(without, withIt, ...dots);
    for (const [kind, label, value] of [["without", "without it", without], ["with", "with it", withIt]]) {
      const bar = section.querySelector(`.bar.${kind} span`);
      bar.style.width = `${Math.max(0.5, (100 * value) / longest)}%`;
      bar.textContent = `${label}: ${seconds(value)}`;
    }
    const share = withIt / without;
    section.querySelector(".share").textContent =
      share < 0.995 ? `${number(100 * (1 - share))} % less` : share > 1.005 ? "it does not pay here" : "no difference here";
    const left = outside(idea, said);
    section.classList.toggle("extrapolated", left.length > 0);
    section.querySelector(".outside").hidden = !left.length;
    section.querySelector(".outside span").textContent = `outside what was measured: ${left.join("; ")}`;
    drawRun(section, found, longest);
  }
}

function setAsRecorded(idea) {
  for (const [name, value] of Object.entries(nearest(idea, situation()).run.at)) {
    byName[name].value = byName[name].dataset.log === "1" ? Math.log10(value) : value;
  }
  draw();
}

for (const section of document.querySelectorAll("#bars section")) {
  section.querySelector("button").addEventListener("click", () => setAsRecorded(section.dataset.idea));
}
document.getElementById("situation").addEventListener("input", draw);
for (const idea of Object.keys(IDEAS).reverse()) setAsRecorded(idea);
