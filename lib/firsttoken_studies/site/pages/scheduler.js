// Runs the policy by Pyodide in a worker. The worker is made of this file's text and its files of scheduler-data.js, since
// a page that was opened from a folder may neither start a worker from a file nor fetch one.
const [policy, run, stop, said] = ["policy", "run", "stop", "said"].map((id) => document.getElementById(id));
const rows = [...document.querySelectorAll("#rows tbody tr")];
let worker = null;
let turn = 0; // which run or stop was the last

function inWorker() {
  const python = new Promise((begun) => {
    addEventListener("message", ({ data }) => data.files && begun(begin(data)));
  });

  async function begin({ files, scene }) {
    const types = { wasm: "application/wasm", js: "text/javascript" };
    const blob = (name) => new Blob([files[name]], { type: types[name.split(".").pop()] });
    self.fetch = async (url) => new Response(blob(String(url).split("/").pop()));
    for (const name of ["pyodide.asm.js", "pyodide.js"]) importScripts(URL.createObjectURL(blob(name)));
    const made = await loadPyodide({ indexURL: "file:///" });
    made.FS.writeFile("library.zip", files["library.zip"]);
    made.runPython("import sys; sys.path.insert(0, 'library.zip')");
    made.globals.set("scene", made.toPy(scene));
    postMessage({ begun: true });
    return made;
  }

  addEventListener("message", async ({ data }) => {
    if (data.files) return;
    try {
      const made = await python;
      if (data.text !== undefined) made.FS.writeFile(data.policy, data.text);
      made.globals.set("policy", data.policy);
      const answer = made.runPython("from firsttoken_studies.site.scheduler_scene import told; told(scene, policy)");
      postMessage({ policy: data.policy, row: JSON.parse(answer) });
    } catch (error) {
      postMessage({ broken: error.message });
    }
  });
}

async function unpacked(text) {
  const letters = atob(text);
  const bytes = new Uint8Array(letters.length);
  for (let at = 0; at < letters.length; at++) bytes[at] = letters.charCodeAt(at);
  const whole = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Uint8Array(await new Response(whole).arrayBuffer());
}

function data() {
  return new Promise((done, failed) => {
    const script = document.createElement("script");
    script.onload = done;
    script.onerror = () => failed(new Error("scheduler-data.js is not there"));
    script.src = "scheduler-data.js";
    document.head.append(script);
  });
}

let files = null;
async function begin() {
  files ??= data().then(() => Promise.all(Object.entries(PACKED).map(async ([name, text]) => [name, await unpacked(text)])));
  const known = Object.fromEntries(await files);
  const made = new Worker(URL.createObjectURL(new Blob([`(${inWorker})()`], { type: "text/javascript" })));
  made.postMessage({ files: known, scene: SCENE });
  return made;
}

function show({ policy, row }) {
  const cells = rows.find((one) => one.dataset.policy === policy).querySelectorAll("td + td");
  const values = row.error ? [] : Object.values(row);
  cells.forEach((cell, at) => {
    cell.textContent = values.length ? (values[at] < 100 ? values[at].toPrecision(3) : values[at].toFixed(0)) : "";
    cell.dataset.value = values[at] ?? "";
  });
}

function ended(words, { failed = false, kept = false } = {}) {
  if (!kept) {
    worker?.terminate();
    worker = null;
  }
  said.textContent = words;
  said.classList.toggle("failed", failed);
  [run.disabled, stop.disabled] = [false, true];
}

function unstarted({ message }) {
  const mend = location.protocol === "file:" ? "; try it from a server: python -m http.server -d FOLDER" : "";
  ended(`Python cannot start here: ${message}${mend}`, { failed: true });
}

run.addEventListener("click", async () => {
  [run.disabled, stop.disabled] = [true, false];
  const text = policy.value;
  said.classList.remove("failed");
  said.textContent = worker ? "Your scheduler runs ..." : "Python starts ...";
  const mine = ++turn;
  try {
    const made = worker ?? (await begin());
    if (mine !== turn) return made.terminate(); // stopped meanwhile
    worker = made;
  } catch (error) {
    files = null;
    return mine === turn && unstarted(error);
  }
  worker.onerror = unstarted;
  const waiting = rows.filter((row) => row.dataset.policy === "mine.py" || !row.lastElementChild.dataset.value);
  const next = () => {
    const one = waiting.shift()?.dataset.policy;
    if (!one) return ended("Done.", { kept: true });
    if (one !== "mine.py") said.textContent = `${one} runs beside it ...`;
    worker.postMessage({ policy: one, text: one === "mine.py" ? text : undefined });
  };
  worker.onmessage = ({ data: answer }) => {
    if (answer.begun) return (said.textContent = "Your scheduler runs ...");
    if (answer.broken) return ended(`Python broke down: ${answer.broken}`, { failed: true });
    show(answer);
    if (answer.row.error) ended(answer.row.error, { failed: true, kept: true });
    else next();
  };
  next();
});

stop.addEventListener("click", () => {
  turn++;
  ended("Stopped.");
});
