// The pages beside the disks': mirrors, datastores, what is remembered, memory, flash devices. As in console.test.mjs
// with a real daemon, real requests and a real browser.
import assert from "node:assert/strict";
import { open, mkdir, mkdtemp, readFile, rm, writeFile } from "node:fs/promises";
import { existsSync } from "node:fs";
import { tmpdir } from "node:os";
import { dirname, join, resolve } from "node:path";
import { fileURLToPath } from "node:url";
import { after, before, describe, test } from "node:test";
import { accessible, go, looks, refreshed } from "./common.mjs";
import { Nfs } from "./nfs.mjs";
import { MISSING, until, World } from "./world.mjs";

const MIB = 1 << 20;
const TARGET = resolve(dirname(fileURLToPath(import.meta.url)), "../../target");
const PAGES = [
  ["disks", "Disks"],
  ["disks/pair", "pair"],
  ["datastores", "Datastores"],
  ["datastores/store", "store"],
  ["devices", "Devices"],
  ["memory", "Memory"],
];

/** A part of a page, by its title. */
const card = (page, title) => page.getByRole("region", { name: title, exact: true });

describe("the console's other pages", { skip: MISSING ?? false, timeout: 600000 }, () => {
  let world;
  let kept;
  let nfs;
  const disk = (name) => world.asked("disk", "show", name);
  const leg = (name) => join(world.vms, name);
  const states = async () => Object.fromEntries((await disk("pair")).legs.map((l) => [l.origin, l.state]));

  // Connects again to the datastore after a restart of the daemon.
  const reconnect = async () => {
    nfs.close();
    const store = (await world.asked("datastore", "list")).find((s) => s.name === "store");
    nfs = await Nfs.mount(store.listen, store.path);
  };

  before(async () => {
    world = await World.start({ disks: ["web-1"] });
    await world.filled("a.raw", 16 * MIB);
    await world.image("b.raw", 16 * MIB);
    await world.hearth(["disk", "add", "pair", "--mirror", leg("a.raw"), "--mirror", leg("b.raw")]);
    // A datastore's directory has to be on a file system with lasting names, which a temporary one may not be.
    kept = await mkdtemp(join(existsSync(TARGET) ? TARGET : tmpdir(), "console-"));
    await mkdir(join(kept, "store"));
    await world.hearth(["datastore", "add", join(kept, "store"), "--nfs", "--listen", "127.0.0.1:0", "--client", "127.0.0.1=rw,root,insecure"]);
    const [store] = await world.asked("datastore", "list");
    nfs = await Nfs.mount(store.listen, store.path);
    const file = await nfs.create("vm-flat.vmdk", 8 * MIB);
    for (let i = 0; i < 16; i++) await nfs.write(file, i * 65536, Buffer.alloc(65536, i + 1));
    assert.equal((await nfs.read(file, 65536, 4096))[0], 2);
    await until("both legs are current", async () => Object.values(await states()).every((s) => s === "current"));
  });

  after(async () => {
    nfs?.close();
    await world?.end();
    if (kept) await rm(kept, { recursive: true, force: true });
  });

  looks(test, () => world, PAGES);

  test("a new mirror resyncs throttled, pauses and resumes", async () => {
    await world.filled("solo.raw", 16 * MIB);
    await world.image("solo-2.raw", 16 * MIB);
    await world.image("solo-3.raw", 16 * MIB);
    await world.hearth(["disk", "add", "solo", "--origin", leg("solo.raw")]);
    const page = await world.page();
    await go(page, "disks/solo", "solo");
    await page.getByText("Add a second leg").click();
    await page.getByLabel("Second leg").fill("/etc/hostname");
    await page.getByRole("button", { name: "Make it a mirror" }).click();
    await page.getByText("not below a directory you may reach").waitFor();
    assert.equal(page.wrong.length, 1, "the browser notes what was refused, and nothing else");
    page.wrong.length = 0;
    await page.getByLabel("Second leg").fill(leg("solo-2.raw"));
    await page.getByRole("button", { name: "Make it a mirror" }).click();
    const legs = card(page, "Legs");
    await refreshed(legs.getByRole("listitem", { name: leg("solo-2.raw") }).getByText("current"));
    // Slow enough that it is seen to go on.
    await legs.getByText("Another leg, and how fast is copied").click();
    await legs.getByLabel("Bytes a second that are copied at most").fill("64K");
    await legs.getByRole("button", { name: "Set it" }).click();
    await until("it is slow", async () => (await disk("solo")).upkeep.rate === 65536);
    await legs.getByLabel("A leg more").fill(leg("solo-3.raw"));
    await legs.getByRole("button", { name: "Add the leg" }).click();
    const third = legs.getByRole("listitem", { name: leg("solo-3.raw") });
    await refreshed(third.getByText("resyncing"));
    await refreshed(third.getByRole("progressbar"));
    await accessible(page, "a leg that is copied to");
    await page.getByRole("button", { name: "Pause copying" }).click();
    await refreshed(third.getByText("paused"));
    assert.equal((await disk("solo")).upkeep.paused, true);
    await page.getByRole("button", { name: "Resume copying" }).click();
    await until("copying is resumed", async () => !(await disk("solo")).upkeep.paused);
    await legs.getByLabel("Bytes a second that are copied at most").fill("0");
    await legs.getByRole("button", { name: "Set it" }).click();
    await refreshed(third.getByText("current"));
    await third.getByRole("button", { name: "Take out" }).click();
    await page.getByRole("dialog").getByRole("button", { name: "Take it out" }).click();
    await refreshed(third, "detached");
    assert.equal((await disk("solo")).legs.length, 2);
    assert.deepEqual(await readFile(leg("solo-2.raw")), await readFile(leg("solo.raw")));
    assert.deepEqual(page.wrong, []);
  });

  test("a replaced leg is removed once the new is current", async () => {
    await world.image("c.raw", 16 * MIB);
    const page = await world.page();
    await go(page, "disks/pair", "pair");
    await page.getByRole("button", { name: `Replace ${leg("b.raw")}` }).click();
    await accessible(page, "the dialog");
    await page.getByLabel("New leg").fill(leg("c.raw"));
    // Answers from before the new leg was added arrive until after it.
    let outdated = null;
    let left = Infinity;
    await page.route("**/v1/disks/pair/mirror", async (route) => {
      if (outdated) return route.continue();
      outdated = JSON.stringify(await disk("pair"));
      const response = await route.fetch();
      left = 2;
      return route.fulfill({ response });
    });
    await page.route("**/v1/disks/pair", (route) =>
      outdated && left-- > 0 ? route.fulfill({ contentType: "application/json", body: outdated }) : route.continue(),
    );
    await page.getByRole("button", { name: "Replace it" }).click();
    await until("the new one has its place", async () => {
      const now = await states();
      return now[leg("c.raw")] === "current" && !(leg("b.raw") in now);
    });
    await page.unrouteAll();
    await refreshed(card(page, "Legs").getByRole("listitem", { name: leg("b.raw") }), "detached");
    assert.deepEqual(page.wrong, []);
  });

  test("a lost leg is shown and can be replaced", async () => {
    await world.filled("lone-1.raw", 4 * MIB);
    await world.image("lone-2.raw", 4 * MIB);
    await world.image("lone-3.raw", 4 * MIB);
    await world.hearth(["disk", "add", "lone", "--mirror", leg("lone-1.raw"), "--mirror", leg("lone-2.raw")]);
    await until("both are current", async () => (await disk("lone")).legs.every((l) => l.state === "current"));
    await world.stop(world.daemon);
    await rm(leg("lone-2.raw"));
    await world.serve();
    const page = await world.page();
    await go(page, "disks/lone", "lone");
    const lost = card(page, "Legs").getByRole("listitem", { name: leg("lone-2.raw") });
    await lost.getByText("out", { exact: true }).waitFor();
    await accessible(page, "a leg that is out");
    await lost.getByRole("button", { name: "Replace" }).click();
    await page.getByLabel("New leg").fill(leg("lone-3.raw"));
    await page.getByRole("button", { name: "Replace it" }).click();
    await refreshed(lost, "detached");
    await refreshed(card(page, "Legs").getByRole("listitem", { name: leg("lone-3.raw") }).getByText("current"));
    assert.deepEqual(await readFile(leg("lone-3.raw")), await readFile(leg("lone-1.raw")));
    await reconnect();
  });

  test("a scrub is cancelled, resumed, and its mismatch resolved", async () => {
    const page = await world.page();
    await go(page, "disks/pair", "pair");
    const scrub = card(page, "Scrub");
    const said = page.locator("[data-test=scrub]");
    await scrub.getByText("How often, and how fast").click();
    const speed = async (text, bytes) => {
      await scrub.getByLabel("Bytes a second that are compared at most").fill(text);
      await scrub.getByRole("button", { name: "Set", exact: true }).click();
      await until("the speed is set", async () => (await disk("pair")).upkeep.scrub_rate === bytes);
    };
    await speed("64K", 65536);
    await scrub.getByRole("button", { name: "Scrub now" }).click();
    await refreshed(scrub.getByRole("progressbar"));
    await scrub.getByRole("button", { name: "Call it off" }).click();
    await refreshed(said.getByText(/called off at/i));
    await speed("0", 0);
    await scrub.getByRole("button", { name: "Go on" }).click();
    await refreshed(said.getByText(/16 MiB compared, all the same/));
    // A leg that lies: nobody but somebody knows which of the two.
    const [first] = (await disk("pair")).legs.map((l) => l.origin);
    const last = leg("c.raw");
    const file = await open(last, "r+");
    await file.write(Buffer.alloc(4096, 0xee), 0, 4096, 8 * MIB);
    await file.sync();
    await file.close();
    await scrub.getByRole("button", { name: "Scrub now" }).click();
    await refreshed(said.getByText(/1 places? undecided/));
    await refreshed(scrub.getByText("nothing tells which one is right"));
    await accessible(page, "a scrub that waits");
    const viewer = await world.page({ role: "viewer" });
    await go(viewer, "disks/pair", "pair");
    await viewer.getByText("nothing tells which one is right").waitFor();
    assert.equal(await viewer.getByRole("button", { name: "is right" }).count(), 0);
    await scrub.getByRole("button", { name: `${first} is right` }).click();
    await page.getByRole("dialog").getByRole("button", { name: "It is right" }).click();
    await until("nothing is open", async () => (await disk("pair")).upkeep.scrub.undecided_all === 0);
    await refreshed(scrub.getByText("nothing tells which one is right"), "detached");
    assert.deepEqual(await readFile(last), await readFile(first));
    assert.deepEqual(page.wrong, []);
  });

  test("a datastore has a row and its own page", async () => {
    const page = await world.page();
    await go(page, "disks", "Disks");
    const row = page.getByRole("row", { name: /^store/ });
    await row.getByText("1 file of a datastore").waitFor();
    await refreshed(row.getByText("8 MiB"));
    assert.equal(await page.getByText("vm-flat.vmdk").count(), 0);
    await row.getByRole("link", { name: "store" }).click();
    await page.getByRole("heading", { level: 1, name: /store/ }).waitFor();
    await card(page, "Files that are disks").getByText("vm-flat.vmdk").waitFor();
    await card(page, "Who may come").getByText("127.0.0.1: reads and writes, may be root").waitFor();
    // Dirty, flushed, and the directory has it.
    const file = await nfs.create("new-flat.vmdk", 4 * MIB);
    await nfs.write(file, MIB, Buffer.alloc(65536, 0x5a));
    await page.getByRole("button", { name: "Flush", exact: true }).click();
    await until("the file has it", async () => (await readFile(join(kept, "store/new-flat.vmdk")))[MIB] === 0x5a);
    await refreshed(card(page, "Files that are disks").getByText("new-flat.vmdk"));
    // Held, and no longer.
    await page.getByRole("button", { name: "Flush and hold" }).click();
    await page.getByText("It is held").waitFor();
    assert.equal((await world.asked("datastore", "show", "store")).hold, true);
    await nfs.write(file, 2 * MIB, Buffer.alloc(4096, 0x77));
    assert.equal((await readFile(join(kept, "store/new-flat.vmdk")))[2 * MIB], 0x77);
    await page.getByRole("button", { name: "Hold no longer" }).click();
    await page.getByRole("button", { name: "Flush and hold" }).waitFor();
    // What holds for which files.
    const rules = card(page, "Settings of files by name");
    await rules.getByText("Say something of more files").click();
    await rules.getByLabel("Files like").fill("*.iso");
    await rules.getByLabel("Most flash each may use").fill("much");
    await rules.getByRole("button", { name: "Say so" }).click();
    await rules.getByText("is no size").waitFor();
    await rules.getByLabel("Most flash each may use").fill("64M");
    await rules.getByLabel("Cache mode").selectOption("write-around");
    await rules.getByRole("button", { name: "Say so" }).click();
    await rules.getByText("*.iso: write-around, at most 64 MiB of flash").waitFor();
    assert.equal((await world.asked("datastore", "show", "store")).rules[0].max, 64 * MIB);
    await rules.getByRole("button", { name: "Forget" }).click();
    await rules.getByText("Nothing is said of any file").waitFor();
    // How it is mounted.
    await page.getByText("What to type").click();
    await page.getByText("esxcli storage nfs add --host=127.0.0.1 --share=/store").waitFor();
    await card(page, "Mount it").getByRole("combobox").selectOption("linux");
    await page.getByText("mount -t nfs -o vers=3").waitFor();
    await card(page, "Mount it").getByRole("button", { name: "Copy" }).waitFor();
    await accessible(page, "a datastore");
    assert.deepEqual(page.wrong, []);
  });

  test("a datastore in two directories shows both", async (t) => {
    for (const name of ["one", "two"]) await mkdir(join(kept, name));
    try {
      await world.hearth(["datastore", "add", "twin", "--mirror", join(kept, "one"), "--mirror", join(kept, "two"), "--nfs", "--listen", "127.0.0.1:0"]);
    } catch (e) {
      return t.skip(`two directories cannot be had here: ${e.stderr}`);
    }
    const page = await world.page({ role: "viewer" });
    await go(page, "datastores/twin", "twin");
    for (const name of ["one", "two"]) {
      await page.getByRole("listitem", { name: `Directory ${join(kept, name)}` }).getByText("current").waitFor();
    }
    await accessible(page, "two directories");
    await world.hearth(["datastore", "remove", "twin", "--yes"]);
  });

  test("history survives a restart of the daemon", async () => {
    const page = await world.page();
    await world.load("web-1", 2000);
    for (const [path, heading] of [["", "Overview"], ["disks/web-1", "web-1"]]) {
      await go(page, path, heading);
      await page.getByLabel("Show").first().selectOption("2 hours");
      // A slot of ten seconds is over, and with it what was read.
      await refreshed(page.getByRole("img", { name: /Requests: Reads (?!nothing)/ }));
      await refreshed(page.getByRole("img", { name: /Hit ratio: Read hits \d/ }));
      await page.getByRole("img", { name: /Latency: Reads \d.*, Reads without the cache \d/ }).waitFor();
      await accessible(page, `${heading}, remembered`);
    }
    const { columns } = await page.evaluate(async () => {
      const headers = { "hearth-token": localStorage.getItem("hearth-token") };
      return (await fetch("/v1/history?since=7200&points=480&disk=web-1", { headers })).json();
    });
    const before = columns.reads.reduce((a, b) => a + b, 0);
    assert.ok(before > 0);
    await world.stop(world.daemon);
    await world.serve();
    await refreshed(page.getByText("it is asked again by itself"), "detached");
    await page.getByRole("img", { name: /Hit ratio: Read hits \d/ }).waitFor();
    for (const range of ["2 days", "90 days"]) {
      await page.getByLabel("Show").first().selectOption(range);
      await page.getByRole("img", { name: /Requests: Reads/ }).waitFor();
    }
    // A disk of which nothing is remembered says so.
    await page.getByLabel("Show").first().selectOption("2 hours");
    await world.image("fresh.raw", MIB);
    await world.hearth(["disk", "add", "fresh", "--origin", leg("fresh.raw")]);
    await go(page, "disks/fresh", "fresh");
    await page.getByLabel("Show").first().selectOption("now");
    await page.getByRole("img", { name: /Requests: Reads/ }).waitFor();
    await reconnect();
  });

  test("the memory page shows host, controller and swap", async (t) => {
    const page = await world.page();
    await go(page, "memory", "Memory");
    await page.getByText("No memory controller runs").waitFor();
    await page.getByText(/of .* GiB|of .* MiB/).first().waitFor();
    await page.getByText("hearth swap on --size 8G").first().waitFor();
    const config = join(world.dir, "memory.toml");
    // Guests of this host are not inspected.
    await writeFile(config, "[memory]\nlibvirt = false\n");
    const controller = world.spawn(["memory", "run", "--config", config, "--state-dir", join(world.dir, "memory"), "--log", "error"]);
    const status = join(`${world.run}-memory`, "status.json");
    await until("a controller", () => existsSync(status) || controller.exitCode !== null);
    if (controller.exitCode === null) {
      await refreshed(page.getByRole("heading", { name: "What the controller did" }));
      await page.getByText("The controller knows of no guest").waitFor();
      await accessible(page, "memory, with a controller");
      await world.stop(controller);
      await refreshed(page.getByText("No memory controller runs"));
    } else t.diagnostic("no controller can run here");
    const swap = (...args) => world.hearth(["swap", ...args, "--state-dir", world.state]);
    try {
      await swap("on", "--size", "8M", "--flash", join(world.dir, "flash"));
    } catch (e) {
      t.diagnostic(`no swap can be had here: ${e.stderr}`);
      return;
    }
    try {
      await refreshed(page.getByText("flash.swap").first());
      await refreshed(card(page, "Swap on flash").getByText("on", { exact: true }));
      await accessible(page, "memory, with swap");
    } finally {
      await swap("off");
    }
    await refreshed(page.getByText("There is none. On the host"));
    assert.deepEqual(page.wrong, []);
  });

  test("a flash-only disk moves to an origin", async () => {
    await world.hearth(["disk", "add", "nomad", "--flash-only", "8M"]);
    const page = await world.page();
    await go(page, "disks/nomad", "nomad");
    const move = card(page, "Give it an origin");
    await move.getByText("Move it to a file").click();
    await move.getByLabel("File").fill("/etc/nomad.raw");
    await move.getByRole("button", { name: "Move" }).click();
    await move.getByRole("alert").waitFor();
    assert.equal(existsSync("/etc/nomad.raw"), false);
    const there = join(world.vms, "nomad.raw");
    await move.getByLabel("File").fill(there);
    await move.getByRole("button", { name: "Move" }).click();
    await until("it has moved", async () => (await disk("nomad")).origin === there);
    await refreshed(move, "detached");
    await world.hearth(["disk", "remove", "nomad"]);
  });

  test("a flash device is added and removed online", async () => {
    const page = await world.page();
    await go(page, "devices", "Devices");
    await page.getByRole("button", { name: "Add a device…" }).click();
    const dialog = page.getByRole("dialog");
    await accessible(page, "the dialog for a device");
    await dialog.getByLabel("New device").fill("/etc/flash");
    await dialog.getByLabel("Size of a new file").fill("64M");
    await dialog.getByRole("button", { name: "Add it" }).click();
    await dialog.getByText("not below a directory you may reach").waitFor();
    const second = join(world.vms, "second");
    await dialog.getByLabel("New device").fill(second);
    await dialog.getByRole("button", { name: "Add it" }).click();
    const risk = dialog.getByText("would have to connect again");
    await until("it has begun, or asks", async () => (await risk.count()) > 0 || !(await dialog.isVisible()));
    if (await risk.count()) await dialog.getByRole("button", { name: "Do it nevertheless" }).click();
    const devices = async () => (await world.asked("pool", "show")).flash;
    const many = (n) => until(`${n} devices`, async () => devices().then((d) => d.length === n, () => false), 120000);
    await many(2);
    const card2 = page.getByRole("region", { name: `Flash ${second}` });
    await refreshed(card2.getByText("in use"));
    await refreshed(card2.getByText("64 MiB").first());
    await accessible(page, "two devices");
    await page.getByRole("button", { name: "Take out…" }).click();
    await dialog.getByLabel("Device").selectOption(second);
    await dialog.getByRole("button", { name: "Take it out" }).click();
    await until("it has begun, or asks", async () => (await risk.count()) > 0 || !(await dialog.isVisible()));
    if (await risk.count()) await dialog.getByRole("button", { name: "Do it nevertheless" }).click();
    await many(1);
    await refreshed(card2, "detached");
    await refreshed(page.getByRole("button", { name: "Take out…" }), "detached");
  });

  test("a viewer has no controls and its requests are rejected", async () => {
    const page = await world.page({ role: "viewer" });
    const none = async (...names) => {
      for (const name of names) assert.equal(await page.getByRole("button", { name }).count(), 0, name);
    };
    await go(page, "disks/pair", "pair");
    await card(page, "Scrub").waitFor();
    await none("Pause copying", "Replace", "Take out", "Scrub now", "Add the leg", "Take over its size");
    await go(page, "disks/web-1", "web-1");
    assert.equal(await page.getByText("Add a second leg").count(), 0);
    await go(page, "datastores/store", "store");
    await card(page, "Who may come").waitFor();
    await none("Flush", "Flush and hold", "Say so", "Forget");
    await go(page, "devices", "Devices");
    await page.getByRole("heading", { name: "Pool" }).waitFor();
    await none("Add a device", "Replace", "Take out");
    const statuses = await page.evaluate(async () => {
      const headers = { "hearth-token": localStorage.getItem("hearth-token"), "content-type": "application/json" };
      const ask = async (method, path, body) => (await fetch(path, { method, headers, body: JSON.stringify(body) })).status;
      return [
        await ask("POST", "/v1/disks/pair/scrub", { begin: true }),
        await ask("POST", "/v1/disks/pair/mirror", { paused: true }),
        await ask("PATCH", "/v1/datastores/store", { hold: true }),
        await ask("POST", "/v1/datastores/store/flush", {}),
        await ask("POST", "/v1/pool/flash", { action: "add", new: "/x" }),
        await ask("POST", "/v1/pool/flash/cancel", {}),
      ];
    });
    assert.deepEqual(statuses, [403, 403, 403, 403, 403, 403]);
  });

  test("an operator cannot change the clients of a datastore", async () => {
    const page = await world.page();
    const statuses = await page.evaluate(async () => {
      const headers = { "hearth-token": localStorage.getItem("hearth-token"), "content-type": "application/json" };
      const ask = async (body) => (await fetch("/v1/datastores/store", { method: "PATCH", headers, body: JSON.stringify(body) })).status;
      return [await ask({ clients: [{ network: "0.0.0.0/0", write: true, root: true }] }), await ask({ listen: "0.0.0.0:2049" })];
    });
    assert.deepEqual(statuses, [403, 403]);
  });

  test("pages report a stopped daemon and recover", async () => {
    const page = await world.page();
    await go(page, "datastores/store", "store");
    await world.stop(world.daemon);
    await refreshed(page.getByText("it is asked again by itself"));
    await accessible(page, "a datastore without a daemon");
    for (const [path, heading] of [["memory", "Memory"], ["devices", "Devices"]]) await go(page, path, heading);
    await page.getByRole("heading", { level: 1, name: "Devices" }).waitFor();
    await world.serve();
    await refreshed(page.getByText("it is asked again by itself"), "detached");
    await refreshed(page.getByRole("heading", { name: "Pool" }));
  });
});
