// Just enough of a Redis client for the examples, so that they run (and are tested) without a package: one command after the other,
// replies as Buffers, numbers, arrays or null. A program of yours uses the package `redis` instead.
import net from "node:net";

export function connect() {
  const path = process.env.REDIS_SOCKET;
  const [host, port] = (process.env.REDIS_ADDRESS ?? "127.0.0.1:6379").split(":");
  const socket = path ? net.connect(path) : net.connect(Number(port), host);
  const waiting = [];
  let data = Buffer.alloc(0);
  socket.on("data", (chunk) => {
    data = Buffer.concat([data, chunk]);
    for (let found = parse(data, 0); found && waiting.length; found = parse(data, 0)) {
      data = data.subarray(found.next);
      const { resolve, reject } = waiting.shift();
      found.value instanceof Error ? reject(found.value) : resolve(found.value);
    }
  });
  socket.on("error", (error) => waiting.splice(0).forEach(({ reject }) => reject(error)));
  return {
    send(...words) {
      const parts = words.map((word) => Buffer.from(String(word)));
      socket.write(Buffer.concat([
        Buffer.from(`*${parts.length}\r\n`),
        ...parts.flatMap((part) => [Buffer.from(`$${part.length}\r\n`), part, Buffer.from("\r\n")]),
      ]));
      return new Promise((resolve, reject) => waiting.push({ resolve, reject }));
    },
    close: () => socket.end(),
  };
}

// Return {value, next} of the reply that begins at a place, or null if it is not there as a whole.
function parse(data, at) {
  const end = data.indexOf("\r\n", at);
  if (end < 0) return null;
  const kind = String.fromCharCode(data[at]);
  const text = data.toString("utf8", at + 1, end);
  const next = end + 2;
  if (kind === "+" || kind === ":") return { value: kind === ":" ? Number(text) : text, next };
  if (kind === "-") return { value: new Error(text), next };
  const size = Number(text);
  if (size < 0) return { value: null, next };
  if (kind === "$") return data.length < next + size + 2 ? null : { value: data.subarray(next, next + size), next: next + size + 2 };
  const values = [];
  let place = next;
  for (let index = 0; index < size; index++) {
    const found = parse(data, place);
    if (!found) return null;
    values.push(found.value);
    place = found.next;
  }
  return { value: values, next: place };
}
