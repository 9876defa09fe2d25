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
  new Promise((resolve, failed) => {
    const server = createServer();
    server.on("error", failed);
    server.listen(0, "127.0.0.1", () => {
      const { port } = server.address();
      server.close(() => resolve(port));
    });
  });

/** Limit of each wait in milliseconds; long enough for a loaded machine. */
const PATIENCE = 60000;

/** Waits until `ask` returns true; throws after `limit` milliseconds. */
export async function until(what, ask, limit = PATIENCE) {
  const end = Date.now() + limit;
  for (;;) {
    if (await ask()) return;
    if (Date.now() > end) throw new Error(`${what} did not happen within ${limit} ms`);
    await new Promise((again) => setTimeout(again, 50));
  }
}

/**
 * Waits until `page` shows its frame. The title is set together with the listener for changes of the address: tests can
 * change the address from then on.
 */
async function ready(page) {
  await page.waitForFunction(() => document.title.endsWith(" – Hearth")).catch((e) => {
    throw new Error(`${e.message}; ${page.wrong.join("; ")}`);
  });
}

/** Loads `page` again, and waits until it shows its frame. */
export async function loaded(page) {
  await page.reload();
  await ready(page);
}

let browser = null;
let browserUsers = 0;

/** The browser of this process, started for the first world that needs it. */
function takeBrowser() {
  if (browserUsers++ === 0) browser = chromium.launch({ executablePath: BROWSER, args: ["--no-sandbox", "--disable-gpu"] });
  return browser;
}

async function returnBrowser() {
  if (--browserUsers === 0) await (await browser).close();
}

export class World {
  constructor(dir) {
    this.dir = dir;
    this.run = join(dir, "run");
    this.state = join(dir, "state");
    this.own = join(dir, "monitor");
    this.vms = join(dir, "vms");
    this.children = [];
    this.contexts = new Set();
    this.pages = new Map();
    this.sessions = new Map();
  }

  /**
   * Starts a daemon with `disks` and the options `serve`, and a monitor with the settings `config` and the accounts
   * `accounts` (name, role). The browser is shared by all worlds of a process.
   */
  static async start({ disks = ["web-1", "db-1", "mail-1"], serve = [], config = "", accounts = [] } = {}) {
    const world = new World(await mkdtemp(join(tmpdir(), "hearth-console-")));
    world.options = serve;
    world.config = config;
    try {
      await world.begin(disks, accounts);
    } catch (e) {
      await world.end();
      throw e;
    }
    return world;
  }

  async begin(disks, accounts) {
    await mkdir(join(this.vms, "more"), { recursive: true });
    await this.image("new.raw", 16 << 20);
    await this.image("more/deep.raw", 8 << 20);
    const started = await Promise.allSettled([this.beginDaemon(disks), this.beginMonitor(accounts), this.beginBrowser()]);
    for (const { reason } of started) if (reason) throw reason;
  }

  async beginDaemon(disks) {
    const flash = join(this.dir, "flash");
    await this.hearth(["pool", "create", "--flash", flash, "--size", "256M", "--quick", "--label", "<script>alert(1)</script>"]);
    await this.serve();
    for (const name of disks) await this.disk(name);
  }

  async beginMonitor(accounts) {
    const port = await freePort();
    this.url = `http://127.0.0.1:${port}/`;
    await this.hearth(["console", "enable", "--listen", `127.0.0.1:${port}`, "--allow-path", this.vms, "--state-dir", this.own]);
    for (const [name, role] of accounts) {
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
  }

  async beginBrowser() {
    this.browser = await takeBrowser();
  }

  static password = "correct horse battery";

  async serve() {
    this.daemon = this.spawn(["serve", "--flash", join(this.dir, "flash"), "--state-dir", this.state, "--threads", "1", "--log", "warn", ...this.options]);
    await until("the daemon", () => this.hearth(["disk", "list", "--json"]).then(() => true, () => false));
  }

  /** Adds a disk whose origin is a sparse file of 64 MiB that answers after 4 ms. */
  async disk(name) {
    await this.image(`${name}.raw`, 64 << 20);
    await this.hearth(["disk", "add", name, "--origin", `model-latency=4ms:${this.vms}/${name}.raw`]);
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
    const gone = new Promise((resolve) => child.once("exit", resolve));
    child.kill(signal);
    await gone;
  }

  /** Ends it as a crash does. */
  async kill(child) {
    await this.stop(child, "SIGKILL");
  }

  /** Ends all processes; the browser ends with the last world that uses it. */
  async ended() {
    if (this.browser) {
      this.browser = null;
      for (const context of this.contexts) await context.close();
      await returnBrowser();
    }
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

  /** A browser context that ends with the world. */
  async context(options = {}) {
    const context = await this.browser.newContext({ viewport: { width: 1280, height: 900 }, ...options });
    this.contexts.add(context);
    context.on("close", () => this.contexts.delete(context));
    context.setDefaultTimeout(PATIENCE);
    return context;
  }

  /**
   * A newly loaded page that is logged in with `role`. Calls with the same options share a context and its tab: a new
   * context costs a second of CPU time. With `own`, the context is a new one, which the caller closes. All contexts of a
   * role share its session.
   *
   * Errors of the page, and requests to other hosts, are collected in `page.wrong`. `clock: true` lets `refresh` run the
   * timers of the page ahead.
   */
  async page({ role = "operator", own = false, clock = true, ...options } = {}) {
    const key = JSON.stringify([role, clock, options]);
    let page = own ? null : this.pages.get(key);
    if (page && !page.isClosed()) {
      await page.unrouteAll();
      page.removeAllListeners("dialog");
      page.wrong.length = 0;
      await page.evaluate(() => history.replaceState(null, "", "/"));
      await page.reload();
    } else {
      const session = this.sessions.get(role);
      const context = await this.context(options);
      if (session) {
        // The option storageState would open another page to set the token.
        await context.addCookies(session.cookies);
        await context.addInitScript((token) => location.protocol === "http:" && localStorage.setItem("hearth-token", token), session.token);
      }
      if (clock) await context.clock.install();
      page = await context.newPage();
      page.wrong = [];
      page.on("pageerror", (e) => page.wrong.push(`error: ${e.message}`));
      // An answer with status 404 is shown by the page; it is no error of the page.
      page.on("console", (m) => m.type() === "error" && !m.text().includes("404") && page.wrong.push(`console: ${m.text()}`));
      page.on("request", (r) => !r.url().startsWith(this.url) && page.wrong.push(`elsewhere: ${r.url()}`));
      await page.goto(session ? this.url : await this.link(role));
      if (!own) this.pages.set(key, page);
    }
    await ready(page);
    if (!this.sessions.has(role)) {
      const token = await page.evaluate(() => localStorage.getItem("hearth-token"));
      this.sessions.set(role, { cookies: await page.context().cookies(), token });
    }
    return page;
  }

  async end() {
    await this.ended();
    await rm(this.dir, { recursive: true, force: true });
  }
}
