// Print the messages of a topic as one instance of a group: node consume.mjs TOPIC GROUP [HOW_MANY]
import { connect } from "./redis.mjs";

const [topic, group, howMany] = process.argv.slice(2);
if (!topic || !group) {
  console.error("consume.mjs: usage: node consume.mjs TOPIC GROUP [HOW_MANY]");
  process.exit(2);
}
const tag = `{${process.env.NAMESPACE ?? "duetime"}:0}`;
const streams = [`${tag}:stream:${topic}`, `${tag}:retry:${topic}:${group}`]; // retries of this group have their own
const redis = connect();

for (const [stream, start] of [[streams[0], "$"], [streams[1], "0"]]) {
  await redis.send("XGROUP", "CREATE", stream, group, start, "MKSTREAM").catch((error) => {
    if (!error.message.startsWith("BUSYGROUP")) throw error; // it is registered already
  });
}
for (let left = Number(howMany ?? Infinity); left > 0; ) {
  const words = ["GROUP", group, `node-${process.pid}`, "COUNT", 10, "BLOCK", 1000, "STREAMS", ...streams, ">", ">"];
  for (const [stream, entries] of (await redis.send("XREADGROUP", ...words)) ?? []) {
    for (const [entryId, pairs] of entries) {
      const fields = {};
      for (let at = 0; at < pairs.length; at += 2) fields[pairs[at].toString()] = pairs[at + 1].toString();
      console.log(JSON.stringify({ ...fields, headers: JSON.parse(fields.headers ?? "{}") }));
      await redis.send("XACK", stream, group, entryId);
      left -= 1;
    }
  }
}
redis.close();
