// What a user of BullMQ writes to schedule and cancel jobs. Prints seconds as JSON: node bullmq.mjs SOCKET COUNT
import { Queue } from "bullmq";
import { performance } from "node:perf_hooks";

const [socket, count] = [process.argv[2], Number(process.argv[3])];
const queue = new Queue("bench", { connection: { path: socket, maxRetriesPerRequest: null } });
await queue.waitUntilReady();
const options = (name) => ({ delay: 3600000, jobId: name });
const numbers = (first) => Array.from({ length: count }, (_, n) => first + n);

async function timed(work) {
  const started = performance.now();
  await work();
  return (performance.now() - started) / 1000;
}

async function inTurn(names, call, atOnce = 1) {
  const left = [...names];
  await Promise.all(
    Array.from({ length: atOnce }, async () => {
      for (let name = left.pop(); name !== undefined; name = left.pop()) await call(name);
    }),
  );
}

const add = (n) => queue.add("job", { message: `Hello ${n}` }, options(`job-${n}`));
const seconds = {
  one: await timed(() => inTurn(numbers(0), add)),
  at_once: await timed(() => inTurn(numbers(count), add, 32)),
  many: await timed(() =>
    queue.addBulk(numbers(2 * count).map((n) => ({ name: "job", data: { message: `Hello ${n}` }, opts: options(`job-${n}`) }))),
  ),
  get: await timed(() => inTurn(numbers(0), (n) => queue.getJob(`job-${n}`))),
  cancel: await timed(() => inTurn(numbers(0), async (n) => (await queue.getJob(`job-${n}`)).remove())),
};
const { delayed } = await queue.getJobCounts("delayed");
if (delayed !== 2 * count) throw new Error(`${delayed} jobs are left`);
console.log(JSON.stringify(seconds));
await queue.close();
