// A language model in one file: how a text becomes tokens, tokens become numbers, and numbers the next token.
// The page below it has only a form. Read this from top to bottom; nothing else is needed to run the model.
"use strict";

// 1. Weights: every matrix is a list of rows, one after the other.
//
// In 8-bit rows, a number is an integer from -127 to 127 times the scale of its row, so that a model takes a quarter of
// the space of 32-bit numbers and predicts nearly the same.

/** The bytes of a base64 text. */
function decodeBase64(text) {
  const bytes = new Uint8Array(Math.floor(text.length / 4) * 3 - (text.match(/=*$/)[0].length));
  const block = 1 << 16; // a multiple of 4: atob makes a string, which should not be as long as the model
  for (let from = 0, to = 0; from < text.length; from += block) {
    const part = atob(text.slice(from, from + block));
    for (let i = 0; i < part.length; i++) bytes[to++] = part.charCodeAt(i);
  }
  return bytes;
}

/** A 16-bit floating-point number: 1 bit for the sign, 5 for the exponent, 10 for the fraction. */
function decodeHalf(bits) {
  const sign = bits & 0x8000 ? -1 : 1, exponent = (bits >> 10) & 31, fraction = bits & 1023;
  if (exponent === 31) return fraction ? NaN : sign * Infinity;
  return sign * (exponent ? 2 ** (exponent - 15) * (1 + fraction / 1024) : 2 ** -14 * (fraction / 1024));
}

/** A tensor of the file. info: its shape, its number format, and where its bytes begin. */
function readTensor(bytes, {shape, format, offset}) {
  const columns = shape[shape.length - 1], rows = shape.length > 1 ? shape[0] : 1, size = rows * columns;
  const view = new DataView(bytes.buffer, bytes.byteOffset + offset);
  const floats = (count, at = 0) => Float32Array.from({length: count}, (_, i) => view.getFloat32(at + 4 * i, true));
  if (format === "int8") {
    const data = new Int8Array(bytes.buffer, bytes.byteOffset + offset + 4 * rows, size);
    return {data, scale: floats(rows), rows, columns};
  }
  const data = format === "f32" ? floats(size)
    : Float32Array.from({length: size}, (_, i) => decodeHalf(view.getUint16(2 * i, true)));
  return {data, scale: null, rows, columns};
}

/** Row i of a matrix. */
function rowOf(matrix, i) {
  const row = Float32Array.from(matrix.data.subarray(i * matrix.columns, (i + 1) * matrix.columns));
  return matrix.scale ? row.map(number => number * matrix.scale[i]) : row;
}

/** A linear layer: y_r = sum_c W_rc x_c + b_r. This product is nearly all the work of a language model. */
function linear(x, matrix, bias) {
  const {data, scale, rows, columns} = matrix, y = new Float32Array(rows);
  for (let r = 0, at = 0; r < rows; r++) {
    let a = 0, b = 0, c = 0, d = 0, i = 0; // four sums, which a processor can add at the same time
    for (; i + 3 < columns; i += 4, at += 4) {
      a += data[at] * x[i];
      b += data[at + 1] * x[i + 1];
      c += data[at + 2] * x[i + 2];
      d += data[at + 3] * x[i + 3];
    }
    for (; i < columns; i++, at++) a += data[at] * x[i];
    y[r] = (a + b + c + d) * (scale ? scale[r] : 1) + (bias ? bias.data[r] : 0);
  }
  return y;
}

// 2. The tokenizer: a model reads and writes numbers, the ids of pieces of text.

// Byte-level BPE writes each byte as a character that can be seen. Bytes that cannot be seen get the ones after 255.
const isVisible = byte => (byte >= 33 && byte <= 126) || (byte >= 161 && byte <= 255 && byte !== 173);
const characterOfByte = [], byteOfCharacter = new Map();
for (let byte = 0, hidden = 256; byte < 256; byte++) {
  characterOfByte[byte] = String.fromCharCode(isVisible(byte) ? byte : hidden++);
  byteOfCharacter.set(characterOfByte[byte], byte);
}
// Words with the space before them, numbers, other characters, and spaces, as in GPT-2; the spaces of Unicode.
const SPACE = "\\t-\\r \\x85\\xa0\\u1680\\u2000-\\u200a\\u2028\\u2029\\u202f\\u205f\\u3000";
const WORDS = new RegExp(
  `'(?:[sdmt]|ll|ve|re)| ?\\p{L}+| ?\\p{N}+| ?[^${SPACE}\\p{L}\\p{N}]+|[${SPACE}]+(?![^${SPACE}])|[${SPACE}]+`, "gu");

class Tokenizer {
  /** tokens: the text of each id. merges: pairs of tokens that are joined, the first ones first; `null` if each
   * character is a token. special: ids that stand for no text, such as the end of a text. */
  constructor({tokens, merges, special}) {
    this.tokens = tokens;
    this.special = new Set(special);
    this.ids = new Map(tokens.map((token, id) => [token, id]));
    for (const id of special) this.ids.delete(tokens[id]);
    this.ranks = merges && new Map(merges.map(([left, right], rank) => [left + " " + right, rank]));
    this.words = new Map(); // the ids of words that were seen before
  }

  /** The ids of a text. Characters that the model does not know are left out. */
  encode(text) {
    if (!this.ranks) return [...text].map(character => this.ids.get(character)).filter(id => id !== undefined);
    return (text.match(WORDS) || []).flatMap(word => this.encodeWord(word));
  }

  /** Byte-pair encoding: join the pair of neighbours that was the most frequent one in training, again and again. */
  encodeWord(word) {
    if (this.words.has(word)) return this.words.get(word);
    const parts = [...new TextEncoder().encode(word)].map(byte => characterOfByte[byte]);
    for (;;) {
      let best = -1, lowest = Infinity;
      for (let i = 0; i + 1 < parts.length; i++) {
        const rank = this.ranks.get(parts[i] + " " + parts[i + 1]);
        if (rank < lowest) [best, lowest] = [i, rank];
      }
      if (best < 0) break;
      parts.splice(best, 2, parts[best] + parts[best + 1]);
    }
    const ids = parts.map(part => this.ids.get(part));
    this.words.set(word, ids);
    return ids;
  }

  /** The ids of pieces of text, of which some are from a chat template: only there, names of special tokens count. */
  encodePieces(pieces) {
    const names = [...this.special].map(id => this.tokens[id]).filter(name => name);
    names.sort((one, other) => other.length - one.length);
    const ids = [];
    let plain = "";
    const flush = () => { ids.push(...this.encode(plain)); plain = ""; };
    for (const {text, isTemplate} of pieces) {
      for (let at = 0; at < text.length;) {
        const name = isTemplate && names.find(name => text.startsWith(name, at));
        if (name) { flush(); ids.push(this.tokens.indexOf(name)); at += name.length; }
        else plain += text[at++];
      }
    }
    flush();
    return ids;
  }

  /** The bytes of an id in UTF-8. A token may end within a character. */
  bytes(id) {
    if (this.special.has(id) || this.tokens[id] === undefined) return [];
    if (!this.ranks) return [...new TextEncoder().encode(this.tokens[id])];
    return [...this.tokens[id]].map(character => byteOfCharacter.get(character));
  }
}

// 3. The layers. x is a list of numbers, the meaning of one token so far; each layer adds to it.

/** Divide x by its size, so that the next layer gets numbers of the same size whatever came before. */
function normalise(kind, x, gain, bias, epsilon) {
  if (kind === "none") return x;
  let mean = 0, square = 0;
  if (kind === "layernorm") {
    for (const number of x) mean += number / x.length;
  }
  for (const number of x) square += (number - mean) ** 2 / x.length;
  const factor = 1 / Math.sqrt(square + epsilon);
  return x.map((number, i) => (number - mean) * factor * (gain ? gain.data[i] : 1) + (bias ? bias.data[i] : 0));
}

/** The error function, by Abramowitz and Stegun 7.1.26 (accurate to 1.5e-7). */
function erf(x) {
  const t = 1 / (1 + 0.3275911 * Math.abs(x));
  const sum = ((((1.061405429 * t - 1.453152027) * t + 1.421413741) * t - 0.284496736) * t + 0.254829592) * t;
  return Math.sign(x) * (1 - sum * Math.exp(-x * x));
}

const ACTIVATIONS = {
  silu: x => x / (1 + Math.exp(-x)),
  gelu: x => 0.5 * x * (1 + Math.tanh(Math.sqrt(2 / Math.PI) * (x + 0.044715 * x ** 3))),
  "gelu-exact": x => 0.5 * x * (1 + erf(x / Math.SQRT2)),
  relu: x => Math.max(0, x),
};

/** Rotary positions: turn pairs of numbers by an angle that grows with the position, so that the product of a query and
 * a key depends on how far apart their tokens are. */
function rotate(x, headDim, position, {frequencies, magnitude}) {
  const half = frequencies.length;
  for (let head = 0; head < x.length; head += headDim) {
    for (let i = 0; i < half; i++) {
      const angle = position * frequencies[i], cos = magnitude * Math.cos(angle), sin = magnitude * Math.sin(angle);
      const a = x[head + i], b = x[head + i + half];
      x[head + i] = a * cos - b * sin;
      x[head + i + half] = b * cos + a * sin;
    }
  }
}

/** Numbers that are positive and add up to 1, in the order of the given ones. */
function softmax(x) {
  const largest = x.reduce((a, b) => Math.max(a, b), -Infinity);
  const powers = x.map(number => Math.exp(number - largest));
  const sum = powers.reduce((a, b) => a + b, 0);
  return powers.map(power => power / sum);
}

class Model {
  /** config: sizes and kinds of layers. weights: the tensors by name, as PyTorch names them. */
  constructor(config, weights) {
    this.config = config;
    this.weights = weights;
    this.clear();
  }

  /** Forget the text. The cache holds the keys and values of all its tokens, so that none is computed twice. */
  clear() {
    this.position = 0;
    this.cache = Array.from({length: this.config.layers}, () => ({keys: [], values: []}));
  }

  linear(x, name) {
    return linear(x, this.weights[name + ".weight"], this.weights[name + ".bias"]);
  }

  norm(x, name) {
    const {norm, epsilon} = this.config;
    return normalise(norm, x, this.weights[name + ".weight"], this.weights[name + ".bias"], epsilon);
  }

  /** The norm of each head of x by itself. */
  normHeads(x, name) {
    const size = this.config.headDim;
    for (let head = 0; head < x.length; head += size) x.set(this.norm(x.slice(head, head + size), name), head);
  }

  /** Attention: a token looks at the tokens before it. Its query is compared with the key of each; the values of those
   * that fit are added up. Several heads look for different things; some of them may share their keys and values. */
  attention(x, layer) {
    const {heads, kvHeads, headDim, scale, qkNorm, windows, rope} = this.config;
    const name = `layers.${layer}.attention.`, {keys, values} = this.cache[layer];
    const q = this.linear(x, name + "q_proj"), k = this.linear(x, name + "k_proj");
    if (qkNorm) { this.normHeads(q, name + "q_norm"); this.normHeads(k, name + "k_norm"); }
    if (rope) for (const part of [q, k]) rotate(part, headDim, this.position, rope[layer]);
    keys.push(k);
    values.push(this.linear(x, name + "v_proj"));
    const first = windows[layer] ? Math.max(0, keys.length - windows[layer]) : 0; // a window ends at this token
    const y = new Float32Array(heads * headDim);
    for (let head = 0; head < heads; head++) {
      const at = head * headDim, shared = Math.floor(head * kvHeads / heads) * headDim;
      const scores = new Float32Array(keys.length - first);
      for (let t = 0; t < scores.length; t++) {
        let score = 0;
        for (let i = 0; i < headDim; i++) score += q[at + i] * keys[first + t][shared + i];
        scores[t] = score * scale;
      }
      const shares = softmax(scores);
      for (let t = 0; t < shares.length; t++) {
        for (let i = 0; i < headDim; i++) y[at + i] += shares[t] * values[first + t][shared + i];
      }
    }
    return this.linear(y, name + "o_proj");
  }

  /** The feed-forward layer: what the model knows about a token. With a gate (SwiGLU), one half decides how much of the
   * other passes. */
  expert(x, name) {
    const {activation, gated} = this.config, up = this.linear(x, name + "up_proj");
    if (!gated) return this.linear(up.map(ACTIVATIONS[activation]), name + "down_proj");
    const gate = this.linear(x, name + "gate_proj").map(ACTIVATIONS[activation]);
    return this.linear(up.map((number, i) => number * gate[i]), name + "down_proj");
  }

  /** With several experts, a router chooses a few of them for each token, and weighs their answers. */
  feedforward(x, layer) {
    const {experts, expertsPerToken, normaliseShares} = this.config, name = `layers.${layer}.feedforward.`;
    if (experts === 1) return this.expert(x, name);
    const shares = softmax(linear(x, this.weights[name + "router.weight"]));
    const chosen = [...shares.keys()].sort((a, b) => shares[b] - shares[a]).slice(0, expertsPerToken);
    const sum = normaliseShares ? chosen.reduce((total, expert) => total + shares[expert], 0) : 1;
    const y = new Float32Array(x.length);
    for (const expert of chosen) {
      const answer = this.expert(x, `${name}experts.${expert}.`);
      answer.forEach((number, i) => { y[i] += shares[expert] / sum * number; });
    }
    return y;
  }

  /** One layer: attention, then feed-forward; each adds its answer to x. Where the norms are differs between models. */
  layer(x, layer) {
    const {placement, residual, parallel} = this.config, name = `layers.${layer}.`;
    const add = (one, other) => residual ? one.map((number, i) => number + other[i]) : other;
    if (parallel) {
      const attended = this.attention(this.norm(x, name + "attention_norm"), layer);
      return add(add(x, attended), this.feedforward(this.norm(x, name + "feedforward_norm"), layer));
    }
    for (const part of ["attention", "feedforward"]) {
      const input = placement === "post" ? x : this.norm(x, `${name}${part}_norm`);
      let y = this[part](input, layer);
      if (placement === "sandwich") y = this.norm(y, `${name}${part}_post_norm`);
      x = add(x, y);
      if (placement === "post") x = this.norm(x, `${name}${part}_norm`);
    }
    return x;
  }

  /** Read the next token of the text. Returns a number for each token that may follow: the larger, the likelier. */
  read(id) {
    const {layers, placement, position, width, embeddingScale} = this.config;
    let x = rowOf(this.weights["embedding.weight"], id).map(number => number * embeddingScale);
    if (position === "learned") {
      const added = rowOf(this.weights["position.weight"], this.position);
      x = x.map((number, i) => number + added[i]);
    }
    if (position === "sinusoidal") {
      x = x.map((number, i) => {
        const angle = this.position / 10000 ** ((i - i % 2) / width);
        return number + (i % 2 ? Math.cos(angle) : Math.sin(angle));
      });
    }
    for (let layer = 0; layer < layers; layer++) x = this.layer(x, layer);
    if (placement !== "post") x = this.norm(x, "norm");
    this.position++;
    return linear(x, this.weights["output.weight"] || this.weights["embedding.weight"]); // tied, or of its own
  }
}

// 4. Sampling: one of the likely tokens is drawn, appended to the text, and read in turn.

/** Draw a token. A low temperature prefers likely tokens; at 0, it is always the likeliest. */
function sample(logits, temperature, random) {
  if (temperature <= 0) return logits.reduce((best, logit, id) => logit > logits[best] ? id : best, 0);
  const probabilities = softmax(logits.map(logit => logit / temperature));
  let rest = random();
  for (let id = 0; id < probabilities.length; id++) {
    rest -= probabilities[id];
    if (rest < 0) return id;
  }
  return probabilities.lastIndexOf(Math.max(...probabilities));
}

/** The part of a text that the model reads when it has become longer than the context: it moves on by half a context at
 * a time. */
function contextWindow(ids, context, kept) {
  const room = Math.max(1, context - 1), hop = Math.max(1, Math.floor(context / 2));
  const start = Math.max(0, Math.ceil((ids.length - room) / hop)) * hop;
  const isKept = ids[0] === kept ? 1 : 0; // the token that begins every text
  return [...ids.slice(0, isKept), ...ids.slice(start + isKept)];
}

/** Yield the ids that follow `start`, until one of `stops`. */
function* generate(model, start, {temperature, stops, count, kept = null, random = Math.random}) {
  const {context, tokens} = model.config, ids = [...start];
  model.clear();
  let logits = null, read = 0;
  for (let n = 0; n < count; n++) {
    const seen = contextWindow(ids, context, kept);
    if (model.position + ids.length - read !== seen.length) { // the window has moved: read it from its beginning
      model.clear();
      read = ids.length - seen.length;
      for (const id of seen) { logits = model.read(id); yield null; } // nothing new yet, but the page may show a sign
      read = ids.length;
    } else {
      for (; read < ids.length; read++) { logits = model.read(ids[read]); yield null; }
    }
    const id = sample(logits.subarray(0, tokens), temperature, random);
    if (stops.has(id)) return;
    ids.push(id);
    yield id;
  }
}
