const WAIT_MS = 300; // after the last key
const LIBRARY = new URL("library/", import.meta.url);
const RUNTIME = "ort-wasm-simd-threaded";
// of a sentence in Chinese or Japanese, after which there is no space; as in decode/formats.py
const CJK_END = /[\u2e80-\u9fff\uf900-\ufaff\uff00-\uffef\u{20000}-\u{3ffff}][.!?\u2026"'\u201d\u2019)]*$/u;

const $ = (id) => document.getElementById(id);
const [source, output] = [$("source"), $("output")];
const translations = new Map(); // of lines
let model, tokenizer, settings;
let turn = 0; // of the newest text; an older one is not translated any more
let timer = 0;

function say(text, isError = false) {
  $("message").textContent = text;
  $("message").classList.toggle("error", isError);
}

async function load() {
  settings = await (await fetch("page.json")).json();
  $("languages").textContent = settings.languages;
  [source.lang, output.lang] = [settings.source, settings.target];
  const library = await import(new URL("transformers.min.js", LIBRARY)).catch(() => null);
  if (!library) {
    $("command").textContent = settings.command;
    $("command").hidden = false;
    return say("The library is missing. Run this in the folder of the page, and load it again:", true);
  }
  const { AutoModelForSeq2SeqLM, AutoTokenizer, env } = library;
  Object.assign(env, {
    allowLocalModels: true,
    allowRemoteModels: false,
    useBrowserCache: false, // the service worker keeps the files
    useWasmCache: false,
  });
  const url = (ending) => new URL(`${RUNTIME}.${ending}`, LIBRARY).href;
  env.backends.onnx.wasm.wasmPaths = { mjs: url("mjs"), wasm: url("wasm") };
  say("The model is loading …");
  $("progress").hidden = false;
  const loaded = {}; // bytes of each file
  const progress_callback = (event) => {
    if (event.status !== "progress" || !event.file.endsWith(".onnx")) return;
    loaded[event.file] = event.loaded;
    const bytes = Object.values(loaded).reduce((sum, each) => sum + each, 0);
    $("progress").value = bytes / settings.bytes;
  };
  tokenizer = await AutoTokenizer.from_pretrained("./", { progress_callback });
  model = await AutoModelForSeq2SeqLM.from_pretrained("./", { dtype: "q8", device: "wasm", progress_callback });
  $("progress").hidden = true;
  say("");
  translate();
  // without it, the page translates only while it is online
  await navigator.serviceWorker?.register("service-worker.js").catch(() => {});
}

/** Return the translation of text whose tokens fit the model; null if they do not. */
async function translatePart(text) {
  const inputs = tokenizer(text);
  const length = inputs.input_ids.dims[1];
  if (length > settings.maxTokens) return null;
  const ids = await model.generate({ ...inputs, max_new_tokens: length + settings.maxExtraTokens });
  return tokenizer.batch_decode(ids, { skip_special_tokens: true })[0];
}

/** Return what finds sentences; by the rules of the browser's language if the code is not BCP 47. */
function sentenceSegmenter(code) {
  const options = { granularity: "sentence" };
  try {
    return new Intl.Segmenter(code.replaceAll("_", "-"), options);
  } catch {
    return new Intl.Segmenter(undefined, options);
  }
}

/** Return the translation of a line; the sentences of one that is too long are translated apart. */
async function translateLine(line) {
  if (!line.trim()) return "";
  const whole = await translatePart(line);
  if (whole !== null) return whole;
  let text = "";
  for (const { segment } of sentenceSegmenter(settings.source).segment(line)) {
    const part = segment.trim() ? await translatePart(segment) : "";
    if (part === null) throw new RangeError(`A sentence has more than ${settings.maxTokens} tokens: split it.`);
    if (text && part && !CJK_END.test(text)) text += " ";
    text += part;
  }
  return text;
}

async function translate() {
  const mine = ++turn;
  $("clear").disabled = !source.value;
  if (!model) return;
  const lines = source.value.split("\n").map((line) => line.replace(/\r$/, ""));
  const translated = [];
  let problem = "";
  for (const line of lines) {
    if (!translations.has(line)) {
      say("Translating …");
      await new Promise((resume) => setTimeout(resume)); // for what was typed meanwhile
      if (mine !== turn) return;
      try {
        translations.set(line, await translateLine(line));
      } catch (error) {
        problem = error.message;
      }
      if (mine !== turn) return;
    }
    translated.push(translations.get(line) ?? "");
    output.textContent = translated.join("\n");
  }
  $("copy").disabled = !output.textContent.trim();
  say(problem, Boolean(problem));
}

source.addEventListener("input", () => {
  clearTimeout(timer);
  timer = setTimeout(translate, WAIT_MS);
});
$("clear").addEventListener("click", () => {
  source.value = "";
  source.focus();
  translate();
});
$("copy").addEventListener("click", async () => {
  try {
    await navigator.clipboard.writeText(output.textContent);
    say("The translation is copied.");
  } catch {
    getSelection().selectAllChildren(output);
    say("The translation is selected: copy it.");
  }
});
load().catch((error) => {
  $("progress").hidden = true;
  say(`The model cannot be loaded: ${error.message}`, true);
});
