// Draws the bars of each idea for the situation that the sliders say; the formulas are those of formulas.js.
const sliders = [...document.querySelectorAll("#situation input")];

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

function draw() {
  const said = situation();
  for (const section of document.querySelectorAll("#bars section")) {
    const [without, withIt] = IDEAS[section.dataset.idea](said);
    const longest = Math.max(without, withIt);
    for (const [kind, value] of [["without", without], ["with", withIt]]) {
      const bar = section.querySelector(`.${kind} span`);
      bar.style.width = `${Math.max(0.5, (100 * value) / longest)}%`;
      bar.textContent = seconds(value);
    }
    const share = withIt / without;
    section.querySelector("p").textContent =
      share < 0.995 ? `${number(100 * (1 - share))} % less` : share > 1.005 ? "it does not pay here" : "no difference here";
  }
}

document.getElementById("situation").addEventListener("input", draw);
draw();
