// The console with five hundred disks: `npm run many` prints how long lists, pages and scrolling take, and how many bytes per
// second pages fetch. It asserts nothing, because machines differ; DISKS is the number of disks.
import { request } from "node:http";
import { join } from "node:path";
import { MISSING, until, World } from "./world.mjs";

const DISKS = Number(process.env.DISKS ?? 500);
/** How often each question is asked. */
const ASKED = 21;

if (MISSING) throw new Error(MISSING);

const middle = (all) => [...all].sort((a, b) => a - b)[Math.floor(all.length / 2)];
const ms = (n) => `${n.toFixed(1)} ms`;
/** Seconds for which the transfer of a page is measured. */
const MEASURED = 20;
const say = (what, text) => console.log(`${what.padEnd(46)} ${text}`);

/** Asks the daemon itself, over its socket; milliseconds until the answer is whole. */
const asked = (world, path, { method = "GET", body } = {}) =>
  new Promise((told, failed) => {
    const begun = performance.now();
    const headers = body ? { "content-type": "application/json" } : {};
    const question = request({ socketPath: join(world.run, "api.sock"), path, method, headers }, (answer) => {
      answer.resume();
      answer.on("end", () =>
        answer.statusCode < 300 ? told(performance.now() - begun) : failed(new Error(`${path}: status ${answer.statusCode}`)),
      );
    });
    question.on("error", failed);
    question.end(body && JSON.stringify(body));
  });

const world = await World.start({ disks: [] });
try {
  for (let n = 0; n < DISKS; n++) {
    const file = join(world.vms, `vm-${n}.raw`);
    await world.image(`vm-${n}.raw`, 1 << 20);
    await asked(world, "/v1/disks", { method: "POST", body: { name: `vm-${n}`, origin: file, mode: "write-back" } });
  }
  for (const path of ["/v1/disks", "/v1/stats", "/metrics"]) {
    const all = [];
    for (let i = 0; i < ASKED; i++) all.push(await asked(world, path));
    say(`GET ${path}, ${DISKS} disks`, `${ms(middle(all))} in the middle, ${ms(Math.max(...all))} at most`);
  }
  const page = await world.page({ clock: false });
  // Bytes over the wire, headers included, as the debugger protocol counts them.
  const network = await page.context().newCDPSession(page);
  const paths = new Map();
  const fetched = new Map();
  network.on("Network.requestWillBeSent", ({ requestId, request }) => paths.set(requestId, new URL(request.url).pathname));
  network.on("Network.loadingFinished", ({ requestId, encodedDataLength }) => {
    const path = paths.get(requestId);
    fetched.set(path, (fetched.get(path) ?? 0) + encodedDataLength);
  });
  await network.send("Network.enable");
  const transfer = async (what) => {
    fetched.clear();
    await new Promise((over) => setTimeout(over, MEASURED * 1000));
    const all = [...fetched].sort(([, a], [, b]) => b - a).map(([path, bytes]) => [path, (bytes / MEASURED / 1024).toFixed(2)]);
    const sum = [...fetched.values()].reduce((a, b) => a + b, 0);
    say(`KiB per second fetched by ${what}`, `${(sum / MEASURED / 1024).toFixed(1)}: ${all.map(([path, rate]) => `${path} ${rate}`).join(", ")}`);
  };
  await page.getByRole("heading", { name: "Flash" }).waitFor();
  await transfer("Overview");
  const begun = performance.now();
  await page.evaluate(() => (location.hash = "#/disks"));
  await until("all rows", async () => (await page.locator("tbody tr").count()) === DISKS);
  say("the table of all disks is there after", ms(performance.now() - begun));
  await transfer("Disks");
  await page.evaluate(() => (location.hash = "#/disks/vm-0"));
  await page.getByRole("heading", { level: 1, name: /vm-0/ }).waitFor();
  await transfer("one disk");
  await page.evaluate(() => (location.hash = "#/disks"));
  await until("all rows again", async () => (await page.locator("tbody tr").count()) === DISKS);
  // Frames while the table is scrolled from end to end, as by a hand, and answers come in.
  const frames = await page.evaluate(
    () =>
      new Promise((told) => {
        const box = document.querySelector(".table .scroll");
        const took = [];
        let last = performance.now();
        const step = Math.max(40, box.scrollHeight / 240);
        const frame = (now) => {
          took.push(now - last);
          last = now;
          box.scrollTop += step;
          if (box.scrollTop + box.clientHeight < box.scrollHeight - 1) requestAnimationFrame(frame);
          else told(took.slice(1));
        };
        requestAnimationFrame(frame);
      }),
  );
  const sorted = [...frames].sort((a, b) => a - b);
  const at = (share) => ms(sorted[Math.min(sorted.length - 1, Math.floor(sorted.length * share))]);
  say(`${frames.length} frames of scrolling through it`, `${at(0.5)} in the middle, 95 % within ${at(0.95)}, ${at(1)} at most`);
  const typed = performance.now();
  await page.getByRole("searchbox").fill(`vm-${DISKS - 1}`);
  await until("one row", async () => (await page.locator("tbody tr").count()) === 1);
  say("filtered to one row after", ms(performance.now() - typed));
} finally {
  await world.end();
}
