// Decisions of an operator: which side to trust if flash and origin differ, whether to take over an origin of another pool,
// whether to accept a loss. The tests damage files below a real daemon, and run concurrently, each with its own world.
import assert from "node:assert/strict";
import { execFile, spawn } from "node:child_process";
import { existsSync } from "node:fs";
import { mkdir, open, readFile, rename, truncate, writeFile } from "node:fs/promises";
import { join } from "node:path";
import { promisify } from "node:util";
import { describe, test } from "node:test";
import { accessible, go, refreshed } from "./common.mjs";
import { HEARTH, MISSING, until, World } from "./world.mjs";

const MIB = 1 << 20;
const run = promisify(execFile);
/** So slowly is written back what nobody waits for, that all of it is dirty for the whole test. */
const SLOWLY = ["--destage-rate", "4K"];

/** What a guest writes, and flushes. */
const write = (world, disk, at, bytes, pattern) =>
  run("qemu-io", ["-f", "raw", "-c", `write -P ${pattern} ${at} ${bytes}`, "-c", "flush", `nbd+unix:///${disk}?socket=${world.run}/nbd.sock`]);

/** What is in a file at one place. */
async function byte(file, at) {
  const handle = await open(file, "r");
  try {
    const { buffer } = await handle.read(Buffer.alloc(1), 0, 1, at);
    return buffer[0];
  } finally {
    await handle.close();
  }
}

describe("decisions of an operator", { skip: MISSING ?? false, timeout: 600000, concurrency: true }, () => {
  test("a refused disk trusts its flash or its origin", async () => {
    const world = await World.start({ disks: [], serve: SLOWLY });
    try {
      const sides = ["flash", "origin"];
      const file = (side) => join(world.vms, `${side}.raw`);
      for (const side of sides) {
        await world.image(`${side}.raw`, 16 * MIB);
        await world.hearth(["disk", "add", side, "--origin", file(side)]);
        await write(world, side, MIB, 4 * MIB, 0x5a);
      }
      await world.kill(world.daemon);
      // Somebody puts an older copy in its place.
      for (const side of sides) {
        const other = `${file(side)}.new`;
        await writeFile(other, Buffer.alloc(16 * MIB, 0x11));
        await rename(other, file(side));
      }
      await world.serve();
      const page = await world.page();
      for (const side of sides) {
        await go(page, `disks/${side}`, side);
        await page.getByText("refused", { exact: true }).waitFor();
        await accessible(page, "a disk that is refused");
        const viewer = await world.page({ role: "viewer" });
        await go(viewer, `disks/${side}`, side);
        await viewer.getByText("refused", { exact: true }).waitFor();
        assert.equal(await viewer.getByRole("button", { name: /^Trust/ }).count(), 0);
        await page.getByRole("button", { name: `Trust the ${side}` }).click();
        await refreshed(page.getByText("attached", { exact: true }));
        await refreshed(page.getByRole("button", { name: /^Trust/ }).first(), "detached");
        await world.hearth(["disk", "flush", side]);
      }
      assert.equal(await byte(file("flash"), 2 * MIB), 0x5a, "what was on flash is in the origin");
      assert.equal(await byte(file("origin"), 2 * MIB), 0x11, "the origin is as it was put there");
      assert.deepEqual(page.wrong, []);
    } finally {
      await world.end();
    }
  });

  test("a loss of dirty data is accepted", async () => {
    const world = await World.start({ disks: [], serve: SLOWLY });
    try {
      await world.image("vm.raw", 16 * MIB);
      await world.hearth(["disk", "add", "vm", "--origin", join(world.vms, "vm.raw")]);
      await write(world, "vm", MIB, 8 * MIB, 0x5a);
      await truncate(join(world.dir, "flash"), 2 * MIB);
      await until("something is lost", async () => ((await world.asked("disk", "show", "vm")).lost ?? []).length > 0);
      const page = await world.page();
      await go(page, "disks/vm", "vm");
      await page.getByText("were lost with the flash").waitFor();
      await accessible(page, "a disk that has lost something");
      const viewer = await world.page({ role: "viewer" });
      await go(viewer, "disks/vm", "vm");
      await viewer.getByText("were lost with the flash").waitFor();
      assert.equal(await viewer.getByRole("button", { name: "Accept the loss" }).count(), 0);
      await page.getByRole("button", { name: "Accept the loss" }).click();
      await refreshed(page.getByText("were lost with the flash"), "detached");
      assert.deepEqual((await world.asked("disk", "show", "vm")).lost ?? [], []);
    } finally {
      await world.end();
    }
  });

  test("an origin of another host is taken over", async (t) => {
    const world = await World.start({ disks: [] });
    const views = [];
    let other;
    // Two hosts see a server's directory, each by a mount of its own: what one locks the other does not see.
    const view = async (shared, dir) => {
      await mkdir(dir);
      const child = spawn("bindfs", ["-f", "-o", "attr_timeout=0", shared, dir], { stdio: "ignore" });
      const gone = new Promise((resolve) => {
        child.once("error", resolve);
        child.once("exit", resolve);
      });
      views.push({ child, dir, gone });
      let over = false;
      void gone.then(() => (over = true));
      await until("the directory is seen", () => over || existsSync(join(dir, "d.raw")));
      return !over;
    };
    try {
      const shared = join(world.dir, "shared");
      await mkdir(shared);
      await writeFile(join(shared, "d.raw"), Buffer.alloc(4 * MIB, 0x33));
      const [theirs, ours] = [join(world.dir, "theirs"), join(world.vms, "ours")];
      if (!(await view(shared, theirs)) || !(await view(shared, ours))) return t.skip("bindfs cannot mount here");
      const far = (...args) => run(HEARTH, ["--run-dir", join(world.dir, "far"), ...args]);
      const begin = async () => {
        other = world.spawn(["serve", "--flash", join(world.dir, "far-flash"), "--state-dir", join(world.dir, "far-state"), "--threads", "1", "--log", "error"], "far");
        await until("the other daemon", () => far("disk", "list").then(() => true, () => false));
      };
      await far("pool", "create", "--flash", join(world.dir, "far-flash"), "--size", "160M", "--quick");
      await begin();
      await far("disk", "add", "far", "--origin", join(theirs, "d.raw"));
      await world.kill(other);

      // It is dead, and its record says that the file is its disk's.
      const page = await world.page();
      await go(page, "add", "Add a disk");
      await page.getByLabel("File, device or address").fill(join(ours, "d.raw"));
      await page.getByRole("button", { name: "Look at it" }).click();
      await page.getByRole("status", { name: "What was found" }).getByText("a file").waitFor();
      await page.getByLabel("Name").fill("near");
      const take = page.getByRole("checkbox", { name: /Take it from the pool that has it/ });
      assert.equal(await take.count(), 0, "it is offered before anybody said that it is another's");
      const add = page.getByRole("button", { name: "Add", exact: true });
      await add.click();
      await page.getByRole("alert").getByText("belongs to disk far").waitFor();
      await take.check();
      await accessible(page, "taking over");
      await add.click();
      // Signs of life of the other are waited for first.
      await page.getByText("is attached").waitFor();

      // Now the other way round: ours stands still, theirs takes it, and ours finds out.
      await begin();
      world.daemon.kill("SIGSTOP");
      await far("disk", "set", "far", "--trust", "origin", "--takeover", "--yes");
      world.daemon.kill("SIGCONT");
      await go(page, "disks/near", "near");
      await refreshed(page.getByText("fenced", { exact: true }));
      await accessible(page, "a disk that is another host's now");
      const mine = page.getByRole("button", { name: "Trust the origin" });
      await mine.click();
      await page.getByRole("alert").getByText("belongs to disk far").first().waitFor();
      // It is another's, and that is what is said of it from now on.
      const over = page.getByRole("button", { name: "Take it over…" });
      await over.waitFor();
      await far("disk", "remove", "far");
      await over.click();
      await accessible(page, "whether to take over");
      await page.getByRole("dialog").getByRole("button", { name: "Take it over" }).click();
      await refreshed(page.getByText("attached", { exact: true }));
      assert.equal((await readFile(join(shared, "d.raw")))[0], 0x33);
    } finally {
      world.daemon?.kill("SIGCONT");
      // The daemons have files open below the mounts.
      await world.ended();
      for (const { child, dir, gone } of views.reverse()) {
        await run("umount", ["-l", dir]).catch(() => {});
        child.kill();
        await gone;
      }
      await world.end();
    }
  });
});
