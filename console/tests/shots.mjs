// The pictures of the console in docs/, made anew: `npm run shots`.
import { dirname, join, resolve } from "node:path";
import { execFile } from "node:child_process";
import { fileURLToPath } from "node:url";
import { promisify } from "node:util";
import { go } from "./common.mjs";
import { MISSING, until, World } from "./world.mjs";

const DOCS = resolve(dirname(fileURLToPath(import.meta.url)), "../../docs");

if (MISSING) throw new Error(MISSING);
const world = await World.start({ disks: ["web-1", "web-2", "db-1", "mail-1", "build-1"] });
try {
  for (const disk of ["web-1", "db-1", "web-2"]) await world.load(disk, 8000);
  // A mirror, one leg of which is being copied to.
  const leg = (n) => join(world.vms, `files-${n}.raw`);
  await world.filled("files-a.raw", 64 << 20);
  for (const n of ["b", "c"]) await world.image(`files-${n}.raw`, 64 << 20);
  await world.hearth(["disk", "add", "files", "--mirror", leg("a"), "--mirror", leg("b")]);
  const legs = async () => (await world.asked("disk", "show", "files")).legs;
  await until("the legs are current", async () => (await legs()).every((l) => l.state === "current"));
  await world.hearth(["disk", "scrub", "files"]);
  // One that is only looked at.
  await promisify(execFile)("qemu-img", ["create", "-q", "-f", "qcow2", join(world.vms, "mail-2.qcow2"), "64G"]);
  for (const [scheme, disk] of [["light", "web-1"], ["dark", "db-1"]]) {
    const page = await world.page({ clock: false, colorScheme: scheme });
    // The recorded last hour has too few points for a line yet.
    await page.getByLabel("Show").selectOption("now");
    // Requests while it is open, so that there are lines.
    let enough = false;
    const busy = (async () => {
      while (!enough) for (const name of [disk, "web-2", "mail-1"]) await world.load(name, 1500);
    })();
    const drawn = async () => {
      await page.locator(".chart tbody tr").nth(39).waitFor({ state: "attached", timeout: 120000 });
      // Each of the four tables has ten rows at most; twice as many points make a line.
      await new Promise((go) => setTimeout(go, 20000));
    };
    await drawn();
    const shot = async (path, name, heading) => {
      await page.evaluate((to) => (location.hash = `#/${to}`), path);
      await page.getByRole("heading", { level: 1, name: heading }).waitFor();
      await page.locator("main .loading").first().waitFor({ state: "detached" });
      // A page requests its data after it was opened.
      if (path.startsWith("disks/")) await drawn();
      if (path === "disks") await page.locator("tbody tr", { hasText: disk }).getByText("/s").first().waitFor();
      await page.screenshot({ path: join(DOCS, `console-${name}-${scheme}.png`), fullPage: path.startsWith("disks/") });
    };
    await shot("", "overview", "Overview");
    if (scheme === "light") {
      await shot("disks", "disks", "Disks");
      await go(page, "add", "Add a disk");
      await page.getByRole("button", { name: /vms$|vms\/$/ }).click();
      await page.getByRole("button", { name: "mail-2.qcow2" }).click();
      await page.getByRole("status", { name: "What was found" }).getByText("an image, qcow2").waitFor();
      await page.screenshot({ path: join(DOCS, "console-add-light.png") });
    }
    await shot(`disks/${disk}`, "disk", disk);
    if (scheme === "light") {
      await world.hearth(["disk", "mirror", "files", "--rate", "4M"]);
      await world.hearth(["disk", "mirror", "files", "--add", leg("c")]);
      await page.evaluate(() => (location.hash = "#/disks/files"));
      await page.locator('progress:not([value="0"])').waitFor();
      await page.screenshot({ path: join(DOCS, "console-mirror-light.png") });
    }
    enough = true;
    await busy;
    await page.context().close();
  }
} finally {
  await world.end();
}
