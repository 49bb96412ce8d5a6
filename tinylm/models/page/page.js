// The form: it shows the text while the model writes it. Texts are inserted as text, never as markup.
"use strict";

const get = id => document.getElementById(id);
const file = JSON.parse(get("model").textContent);
const bytes = decodeBase64(get("weights").textContent.trim());
const weights = Object.fromEntries(Object.entries(file.tensors).map(([name, info]) => [name, readTensor(bytes, info)]));
const tokenizer = new Tokenizer(file.tokenizer), model = new Model(file.config, weights);
get("weights").remove(); // its text is no longer needed
document.title = get("name").textContent = file.name;
get("about").textContent = file.about;
for (const part of document.querySelectorAll(file.chat ? ".chat" : ".text")) part.hidden = false;

let running = null; // of the loop below that writes, which ends once this is another
const messages = []; // of a chat: {role, text}, in turns of user and assistant

/** Let the browser draw and react. */
const pause = () => new Promise(resolve => setTimeout(resolve, 0));

/** Write what follows the ids: call `show` with each new piece of text. */
async function write(start, show, stops) {
  const decoder = new TextDecoder(), temperature = Number(get("temperature").value);
  const count = Number(get("count").value) || 200, began = performance.now();
  let last = performance.now(), written = 0;
  const run = running = {};
  get("go").textContent = "Stop";
  for (const id of generate(model, start, {temperature, stops, count, kept: file.kept})) {
    if (id !== null) {
      show(decoder.decode(Uint8Array.from(tokenizer.bytes(id)), {stream: true}));
      written++;
    }
    if (performance.now() - last > 16) { await pause(); last = performance.now(); }
    if (running !== run) break;
  }
  if (running === run) {
    show(decoder.decode());
    running = null;
  }
  if (running) return; // the next text
  get("go").textContent = "Write";
  get("speed").textContent = `${(1000 * written / (performance.now() - began)).toFixed(0)} tokens per second`;
}

/** The conversation as pieces of text, up to the next answer: the template's and those of the messages. */
function conversation() {
  const {first, next} = file.chat, pieces = [];
  messages.forEach(({role, text}, index) => {
    const [before, after] = index ? next : first;
    if (role === "user") pieces.push({text: before, isTemplate: true}, {text}, {text: after, isTemplate: true});
    else pieces.push({text});
  });
  return pieces;
}

function addMessage(role, text) {
  const element = document.createElement("p");
  element.className = role;
  element.textContent = text;
  get("messages").append(element);
  messages.push({role, text});
  return element;
}

async function chat() {
  const question = get("question").value.trim();
  if (!question) return;
  get("question").value = "";
  addMessage("user", question);
  const start = tokenizer.encodePieces(conversation()), {context} = model.config;
  if (start.length >= context) {
    addMessage("assistant", "").textContent = "The conversation is longer than the model can read. Begin a new one.";
    messages.splice(-2);
    return;
  }
  const element = addMessage("assistant", ""), message = messages[messages.length - 1];
  await write(start, piece => {
    message.text += piece;
    const end = file.chat.end ? message.text.indexOf(file.chat.end) : -1;
    if (end >= 0) { message.text = message.text.slice(0, end); running = null; }
    element.textContent = message.text;
  }, new Set([...file.stops, ...file.chat.stops]));
}

async function continueText() {
  const ids = tokenizer.encode(get("text").value), start = ids.length ? [...file.before, ...ids] : file.start;
  await write(start, piece => {
    get("text").value += piece;
    get("text").scrollTop = get("text").scrollHeight;
  }, new Set(file.stops));
}

get("form").onsubmit = event => {
  event.preventDefault();
  if (running) running = null;
  else if (file.chat) chat();
  else continueText();
};
get("temperature").oninput = () => { get("shown").textContent = get("temperature").value; };
get("clear").onclick = () => {
  running = null;
  messages.length = 0;
  get("messages").replaceChildren();
  get("text").value = "";
};
