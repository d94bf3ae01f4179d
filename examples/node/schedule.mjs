// Schedule a message from Node, without any package: node schedule.mjs DELAY_SEC TOPIC MESSAGE
// REDIS_ADDRESS is host:port, REDIS_SOCKET a path instead; NAMESPACE is Duetime's.
import { randomBytes } from "node:crypto";
import { readFileSync } from "node:fs";
import { connect } from "./redis.mjs";

function fail(code, sentence) {
  console.error(`schedule.mjs: ${sentence}`);
  process.exit(code);
}

const [delaySec, topic, message] = process.argv.slice(2);
if (process.argv.length !== 5) fail(2, "usage: node schedule.mjs DELAY_SEC TOPIC MESSAGE, such as: node schedule.mjs 1.5 mail 'tea is ready'");
if (!/^[0-9]{1,8}(\.[0-9]+)?$/.test(delaySec)) fail(2, `DELAY_SEC is a number of seconds such as 5 or 1.5, not ${delaySec}`);
if (!/^[A-Za-z0-9._-]{1,64}$/.test(topic)) fail(2, `TOPIC has 1 to 64 of A-Z a-z 0-9 . _ -, and is ${topic}`);
if (message === "") fail(2, "MESSAGE is empty");

const tag = `{${process.env.NAMESPACE ?? "duetime"}:0}`;
const redis = connect();
try {
  const [seconds, microseconds] = await redis.send("TIME"); // the server's clock is the one that counts
  const dueMs = Number(seconds) * 1000 + Math.floor(Number(microseconds) / 1000) + Math.ceil(Number(delaySec) * 1000);
  const startMs = dueMs - (dueMs % 600000);
  const id = randomBytes(11).toString("hex"); // 22 characters that no other message has
  const member = `${id}j${JSON.stringify({ topic, message })}`;
  const script = readFileSync(new URL("../schedule.lua", import.meta.url));
  await redis.send("EVAL", script, 2, `${tag}:bucket:${startMs}`, `${tag}:buckets`, dueMs, startMs, member, `${tag}:wake`);
  console.log(`${id} is due at ${dueMs}`);
} catch (error) {
  fail(1, `the message is not known to be scheduled: ${error.message}`);
}
redis.close();
