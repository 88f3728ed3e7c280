// Shows the rows that agree with every filter, and says how many they are.
const form = document.getElementById("filters");
const rows = [...document.querySelectorAll("#claims tbody tr")];

function show() {
  const asked = Object.fromEntries(new FormData(form));
  const words = asked.words.toLowerCase();
  let count = 0;
  for (const row of rows) {
    const fits =
      ["report", "whose", "ground", "verdict"].every((name) => !asked[name] || row.dataset[name] === asked[name]) &&
      row.textContent.toLowerCase().includes(words);
    row.hidden = !fits;
    count += fits;
  }
  document.getElementById("shown").textContent = `${count} of ${rows.length}`;
}

for (const kind of ["input", "change"]) form.addEventListener(kind, show);
form.addEventListener("submit", (event) => event.preventDefault());
show();
