// Draws the bars of each idea for the situation that the numbers say, and the recorded run that is nearest to it; the
// formulas are those of formulas.js, the runs those of runs.js. A number holds the value, the slider below it follows.
const sliders = [...document.querySelectorAll("#situation input[type=range]")];
const byName = Object.fromEntries(sliders.map((slider) => [slider.name, slider]));
const numbers = Object.fromEntries(sliders.map(({ name }) => [name, document.querySelector(`input[data-of=${name}]`)]));
const choices = [...document.querySelectorAll("#situation select")];
const KINDS = ["without", "with", "rival"];

function number(value) {
  return value >= 100 ? value.toFixed(0) : value.toPrecision(3);
}

function seconds(value) {
  return value >= 1 ? `${number(value)} s` : `${number(1000 * value)} ms`;
}

function set(name, value) {
  numbers[name].value = byName[name].dataset.whole === "1" ? Math.round(value) : Number(value.toPrecision(4));
  slide(name, value);
}

function slide(name, value) {
  byName[name].value = byName[name].dataset.log === "1" ? Math.log10(value) : value;
}

function placed(slider) {
  return Number((slider.dataset.log === "1" ? 10 ** Number(slider.value) : Number(slider.value)).toPrecision(3));
}

function situation() {
  return Object.fromEntries(sliders.map(({ name }) => [name, Number(numbers[name].value)]));
}

// How far a setting is from a value: 1 is as far as still counts as the same.
function distance(name, setting, value) {
  if (byName[name].dataset.log === "1") return Math.abs(Math.log(setting / value)) / Math.log(CLOSE);
  return Math.abs(setting - value) / CLOSE_SHARE;
}

// The run that is nearest to all settings together, and whether each of them is what it was then.
function nearest(idea, said) {
  const found = RUNS[idea].map((run) => {
    const apart = Object.entries(run.at).map(([name, value]) => distance(name, said[name], value));
    return { run, far: apart.reduce((sum, each) => sum + each), here: Math.max(...apart) <= 1 };
  });
  return found.reduce((best, each) => (each.far < best.far ? each : best));
}

function share(idea, said) {
  const [without, withIt] = IDEAS[idea](said);
  return withIt / without;
}

// The titles of the settings outside what was recorded with the idea, as far as its result depends on them.
function outside(idea, said) {
  const names = Object.entries(RANGES[idea]).filter(([name, [least, most]]) => {
    const nearer = Math.min(Math.max(said[name], least), most);
    if (distance(name, said[name], nearer) <= 1) return false;
    return Math.abs(share(idea, { ...said, [name]: nearer }) - share(idea, said)) > CLOSE_SHARE;
  });
  return names.map(([name]) => byName[name].getAttribute("aria-label"));
}

function drawRun(section, { run, here }, longest) {
  for (const kind of KINDS.filter((each) => run[`${each}_s`] !== null)) {
    const dot = section.querySelector(`.track.${kind} i`);
    dot.hidden = run[`${kind}_s`] > longest;
    dot.style.left = `${(100 * run[`${kind}_s`]) / longest}%`;
    dot.className = here ? "here" : "";
  }
  const labels = KINDS.filter((kind) => run[`${kind}_s`] !== null).map((kind) => section.querySelector(`.bar.${kind} b`).textContent);
  const times = KINDS.filter((kind) => run[`${kind}_s`] !== null).map((kind, index) => `${seconds(run[`${kind}_s`])} (${labels[index]})`);
  const source = run.machine.startsWith("operators") ? `computed from the measured ${run.machine}` : `n = ${run.n}, ${run.machine}`;
  section.querySelector(".run span").textContent = `Recorded ${here ? "here" : "with other settings"}: ${times.join(", ")}; ${source}.`;
  const link = section.querySelector(".run a");
  link.textContent = `Notebook ${run.notebook}`;
  link.href = PAGES[run.notebook];
}

function gain(section, ratio, kind) {
  const than = section.querySelector(`.bar.${kind} b`).textContent;
  if (Math.abs(ratio - 1) < 0.005) return `as long as “${than}”`;
  return ratio < 1 ? `${number(100 * (1 - ratio))} % less than “${than}”` : `${number(100 * (ratio - 1))} % more than “${than}”: a loss`;
}

function draw() {
  const said = situation();
  for (const section of document.querySelectorAll("#bars section")) {
    const idea = section.dataset.idea;
    const times = Object.fromEntries(IDEAS[idea](said).map((value, index) => [KINDS[index], value]));
    const found = nearest(idea, said);
    const dots = found.here ? KINDS.map((kind) => found.run[`${kind}_s`] || 0) : [];
    const longest = Math.max(...Object.values(times), ...dots);
    for (const [kind, value] of Object.entries(times)) {
      section.querySelector(`.bar.${kind} span`).style.width = `${Math.max(0.5, (100 * value) / longest)}%`;
      section.querySelector(`.bar.${kind} output`).textContent = seconds(value);
    }
    const others = Object.keys(times).filter((kind) => kind !== "with");
    section.querySelector(".share").textContent = others.map((kind) => gain(section, times.with / times[kind], kind)).join("; ");
    if (idea === "PETALS") section.querySelector(".price span").textContent = `, at least ${seconds(hops_s(said, 1))} each`;
    const names = outside(idea, said);
    section.classList.toggle("extrapolated", names.length > 0);
    section.querySelector(".outside").hidden = !names.length;
    section.querySelector(".outside span").textContent = `the result depends on what lies outside the record: ${names.join("; ")}`;
    drawRun(section, found, longest);
  }
}

function choose(choice) {
  for (const [name, value] of Object.entries(PRESETS[choice.dataset.kind][choice.value] || {})) set(name, value);
}

// A choice whose numbers were changed is none any more.
function unchoose(name) {
  for (const choice of choices) if (name in Object.values(PRESETS[choice.dataset.kind])[0]) choice.value = "";
}

function setAsRecorded(idea) {
  for (const [name, value] of Object.entries(nearest(idea, situation()).run.at)) {
    set(name, value);
    unchoose(name);
  }
  draw();
}

for (const section of document.querySelectorAll("#bars section")) {
  section.querySelector("button").addEventListener("click", () => setAsRecorded(section.dataset.idea));
}
document.getElementById("situation").addEventListener("submit", (event) => event.preventDefault());
document.getElementById("situation").addEventListener("input", ({ target }) => {
  if (target.type === "range") set(target.name, placed(target));
  if (target.dataset.of && (!target.value || !target.checkValidity())) return; // not a number that a bound holds for
  if (target.dataset.of) slide(target.dataset.of, Number(target.value));
  if (!target.dataset.kind) unchoose(target.dataset.of || target.name);
  draw();
});
for (const choice of choices) {
  choice.addEventListener("change", () => {
    choose(choice);
    draw();
  });
}
choices.forEach(choose);
draw();
