// BullMQ: addBulk; a worker of 100 jobs at a time that keeps none that are done. node bullmq_jobs.mjs VERB SOCKET, as shared.py says.
// The further verb "verbs" measures single calls, for bench/client.py: node bullmq_jobs.mjs verbs SOCKET COUNT.
import { readFileSync, writeSync } from "node:fs";
import { createRequire } from "node:module";
import { performance } from "node:perf_hooks";

const { Queue, Worker } = createRequire(`${process.cwd()}/`)("bullmq"); // which is installed where this is started
const [verb, socket] = process.argv.slice(2);
const JOBS_AT_ONCE = 100;
const BULK_JOBS = 5000;
const connection = { path: socket, maxRetriesPerRequest: null };
const tell = (answer) => writeSync(1, `${JSON.stringify(answer)}\n`);
const textOf = (number) => `reminder ${String(number).padStart(9, "0")} for a customer`;

async function timed(work) {
  const started = performance.now();
  await work();
  return (performance.now() - started) / 1000;
}

async function withQueue(work) {
  const queue = new Queue("bench", { connection });
  await queue.waitUntilReady();
  await work(queue);
  await queue.close();
}

async function schedule(queue) {
  const dueMs = JSON.parse(readFileSync(0, "utf8"));
  const job = (due, number) => ({
    name: "remind",
    data: textOf(number),
    opts: { delay: Math.max(0, due - Date.now()), removeOnComplete: true },
  });
  const seconds = await timed(async () => {
    for (let first = 0; first < dueMs.length; first += BULK_JOBS)
      await queue.addBulk(dueMs.slice(first, first + BULK_JOBS).map((due, place) => job(due, first + place)));
  });
  tell({ seconds });
}

function work() {
  const record = async (job) => {
    writeSync(1, `${Math.floor((performance.timeOrigin + performance.now()) * 1000)} ${job.data}\n`);
  };
  const worker = new Worker("bench", record, { connection, concurrency: JOBS_AT_ONCE });
  process.on("SIGTERM", () => worker.close().then(() => process.exit(0)));
}

async function inTurn(names, call, atOnce = 1) {
  const left = [...names];
  await Promise.all(
    Array.from({ length: atOnce }, async () => {
      for (let name = left.pop(); name !== undefined; name = left.pop()) await call(name);
    }),
  );
}

async function measureVerbs(queue) {
  const count = Number(process.argv[4]);
  const options = (name) => ({ delay: 3600000, jobId: name });
  const numbers = (first) => Array.from({ length: count }, (_, n) => first + n);
  const add = (n) => queue.add("job", { message: `Hello ${n}` }, options(`job-${n}`));
  const bulk = (n) => ({ name: "job", data: { message: `Hello ${n}` }, opts: options(`job-${n}`) });
  const seconds = {
    one: await timed(() => inTurn(numbers(0), add)),
    at_once: await timed(() => inTurn(numbers(count), add, 32)),
    many: await timed(() => queue.addBulk(numbers(2 * count).map(bulk))),
    get: await timed(() => inTurn(numbers(0), (n) => queue.getJob(`job-${n}`))),
    cancel: await timed(() => inTurn(numbers(0), async (n) => (await queue.getJob(`job-${n}`)).remove())),
  };
  const { delayed } = await queue.getJobCounts("delayed");
  if (delayed !== 2 * count) throw new Error(`${delayed} jobs are left`);
  tell(seconds);
}

if (verb === "work") work();
else await withQueue(verb === "schedule" ? schedule : measureVerbs);
