// Schedule a message from Node, without any package: node schedule.mjs DELAY_SEC TOPIC MESSAGE
// REDIS_ADDRESS is host:port, REDIS_SOCKET a path instead; NAMESPACE is Duetime's.
import { randomBytes } from "node:crypto";
import { readFileSync } from "node:fs";
import { connect } from "./redis.mjs";

const [delaySec, topic, message] = process.argv.slice(2);
const tag = `{${process.env.NAMESPACE ?? "duetime"}:0}`;
const redis = connect();

const [seconds, microseconds] = await redis.send("TIME"); // the server's clock is the one that counts
const dueMs = Number(seconds) * 1000 + Math.floor(Number(microseconds) / 1000) + Math.ceil(Number(delaySec) * 1000);
const startMs = dueMs - (dueMs % 600000);
const id = randomBytes(11).toString("hex"); // 22 characters that no other message has
const member = `${id}j${JSON.stringify({ topic, message })}`;
const script = readFileSync(new URL("../schedule.lua", import.meta.url));
await redis.send("EVAL", script, 2, `${tag}:bucket:${startMs}`, `${tag}:buckets`, dueMs, startMs, member, `${tag}:wake`);
console.log(`${id} is due at ${dueMs}`);
redis.close();
