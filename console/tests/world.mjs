// A real daemon with real disks under load, its console, and a browser in front of it.
//
// HEARTH_BIN names the binary (default: target/debug/hearth), HEARTH_CHROMIUM the browser. Everything is in a
// directory of its own, which is gone afterwards.
import { execFile, spawn } from "node:child_process";
import { existsSync } from "node:fs";
import { mkdir, mkdtemp, open, rm, writeFile } from "node:fs/promises";
import { createServer } from "node:net";
import { tmpdir } from "node:os";
import { dirname, join, resolve } from "node:path";
import { fileURLToPath } from "node:url";
import { promisify } from "node:util";
import { chromium } from "playwright-core";

const run = promisify(execFile);
const ROOT = resolve(dirname(fileURLToPath(import.meta.url)), "../..");
export const HEARTH = process.env.HEARTH_BIN ?? join(ROOT, "target/debug/hearth");
const BROWSERS = [process.env.HEARTH_CHROMIUM, "/usr/bin/chromium", "/usr/bin/chromium-browser", "/usr/bin/google-chrome"];
export const BROWSER = BROWSERS.find((path) => path && existsSync(path));

/** Why these tests cannot run here, if so. */
export const MISSING = !BROWSER ? "no Chromium" : !existsSync(HEARTH) ? `no ${HEARTH}` : null;

/** A port that was free a moment ago. */
const freePort = () =>
  new Promise((told, failed) => {
    const server = createServer();
    server.on("error", failed);
    server.listen(0, "127.0.0.1", () => {
      const { port } = server.address();
      server.close(() => told(port));
    });
  });

/** Longest that is waited for anything, on a machine that has much else to do. */
const PATIENCE = 60000;

/** Asks until it is true; a test that waits for ever is ended by its own limit. */
export async function until(what, ask, limit = PATIENCE) {
  const end = Date.now() + limit;
  for (;;) {
    if (await ask()) return;
    if (Date.now() > end) throw new Error(`${what} did not happen within ${limit} ms`);
    await new Promise((again) => setTimeout(again, 50));
  }
}

export class World {
  constructor(dir) {
    this.dir = dir;
    this.run = join(dir, "run");
    this.state = join(dir, "state");
    this.own = join(dir, "monitor");
    this.vms = join(dir, "vms");
    this.children = [];
  }

  /** A world with these disks, whose daemon has these options besides, and whose second service these settings. */
  static async start({ disks = ["web-1", "db-1", "mail-1"], serve = [], config = "" } = {}) {
    const world = new World(await mkdtemp(join(tmpdir(), "hearth-console-")));
    world.options = serve;
    world.config = config;
    try {
      await world.begin(disks);
    } catch (e) {
      await world.end();
      throw e;
    }
    return world;
  }

  async begin(disks) {
    await mkdir(this.vms);
    const flash = join(this.dir, "flash");
    await this.hearth(["pool", "create", "--flash", flash, "--size", "256M", "--quick", "--label", "<script>alert(1)</script>"]);
    await this.serve();
    for (const name of disks) {
      await this.image(`${name}.raw`, 64 << 20);
      await this.hearth(["disk", "add", name, "--origin", `model-latency=4ms:${this.vms}/${name}.raw`]);
    }
    await this.image("new.raw", 16 << 20);
    await mkdir(join(this.vms, "more"));
    await this.image("more/deep.raw", 8 << 20);
    const port = await freePort();
    this.url = `http://127.0.0.1:${port}/`;
    await this.hearth(["console", "enable", "--listen", `127.0.0.1:${port}`, "--allow-path", this.vms, "--state-dir", this.own]);
    for (const [name, role] of [["anna", "operator"], ["board", "viewer"]]) {
      await this.hearth(["console", "account", "add", name, "--role", role, "--state-dir", this.own], `${World.password}\n`);
    }
    const config = join(this.dir, "hearth.toml");
    await writeFile(config, this.config);
    this.console = this.spawn(["monitor", "--config", config, "--state-dir", this.own, "--log", "warn"]);
    await until("the console", async () => {
      try {
        return (await fetch(this.url)).ok;
      } catch {
        return false;
      }
    });
    this.browser = await chromium.launch({ executablePath: BROWSER, args: ["--no-sandbox"] });
  }

  static password = "correct horse battery";

  async serve() {
    this.daemon = this.spawn(["serve", "--flash", join(this.dir, "flash"), "--state-dir", this.state, "--threads", "1", "--log", "warn", ...this.options]);
    await until("the daemon", () => this.hearth(["disk", "list", "--json"]).then(() => true, () => false));
  }

  async image(name, size) {
    const file = await open(join(this.vms, name), "w");
    await file.truncate(size);
    await file.close();
  }

  /** An image in which no block is like another, so that copying and comparing it has something to do. */
  async filled(name, size) {
    const data = Buffer.alloc(size);
    for (let at = 0; at < size; at += 4) data.writeUInt32LE((Math.imul(at + 1, 2654435761) ^ size) >>> 0, at);
    await writeFile(join(this.vms, name), data);
  }

  /** What a command says, as it says it to programs. */
  async asked(...args) {
    return JSON.parse(await this.hearth([...args, "--json"]));
  }

  /** A command, to its end; what it printed. */
  async hearth(args, input) {
    const done = run(HEARTH, ["--run-dir", this.run, ...args], { maxBuffer: 16 << 20 });
    // Not every command reads what it is given.
    done.child.stdin.on("error", () => {});
    done.child.stdin.end(input ?? "");
    return (await done).stdout;
  }

  /** A process of ours, in the run directory of that name. */
  spawn(args, run = "run") {
    const child = spawn(HEARTH, ["--run-dir", join(this.dir, run), ...args], { stdio: ["ignore", "inherit", "inherit"] });
    this.children.push(child);
    return child;
  }

  async stop(child, signal = "SIGTERM") {
    if (child.exitCode !== null || child.signalCode !== null) return;
    const gone = new Promise((told) => child.once("exit", told));
    child.kill(signal);
    await gone;
  }

  /** Ends it as a crash does. */
  async kill(child) {
    await this.stop(child, "SIGKILL");
  }

  /** Ends all processes, the browser included. */
  async ended() {
    await this.browser?.close();
    for (const child of this.children.reverse()) await this.stop(child);
    this.children = [];
  }

  /** Requests of a guest that reads the same places again and again, and writes some. */
  async load(disk, requests = 3000, share = 16 << 20) {
    const lines = [];
    // The same every time: a small generator with a fixed seed.
    let seed = 7;
    const random = (below) => {
      seed = (Math.imul(seed, 1103515245) + 12345) >>> 0;
      return Math.floor((seed / 2 ** 32) * below);
    };
    for (let i = 0; i < requests; i++) {
      const hot = random(10) < 8;
      const block = random((hot ? share / 8 : share) / 4096);
      lines.push(`${i * 1000},${random(5) === 0 ? "w" : "r"},${block * 4096},4096`);
    }
    const trace = join(this.dir, `${disk}.csv`);
    await writeFile(trace, lines.join("\n") + "\n");
    await this.hearth(["trace", "replay", trace, "--to", `nbd+unix:///${disk}?socket=${this.run}/nbd.sock`, "--depth", "16", "--overwrite", "--format", "csv"]);
  }

  async link(role = "operator") {
    return (await this.hearth(["console", "open", "--role", role, "--state-dir", this.own])).trim();
  }

  /** A page somebody is logged in to. What goes wrong in it, or leaves the host, is written down. */
  async page({ role = "operator", ...more } = {}) {
    const context = await this.browser.newContext({ viewport: { width: 1280, height: 900 }, ...more });
    context.setDefaultTimeout(PATIENCE);
    const page = await context.newPage();
    page.wrong = [];
    page.on("pageerror", (e) => page.wrong.push(`error: ${e.message}`));
    // That something is not there is an answer, which the page shows.
    page.on("console", (m) => m.type() === "error" && !m.text().includes("404") && page.wrong.push(`console: ${m.text()}`));
    page.on("request", (r) => !r.url().startsWith(this.url) && page.wrong.push(`elsewhere: ${r.url()}`));
    await page.goto(await this.link(role));
    await page.getByRole("heading", { name: "Overview" }).waitFor().catch((e) => { throw new Error(`${e.message}; ${page.wrong.join("; ")}`); });
    return page;
  }

  async end() {
    await this.ended();
    await rm(this.dir, { recursive: true, force: true });
  }
}
