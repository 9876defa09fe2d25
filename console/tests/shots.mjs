// The pictures of the console in docs/, made anew: `npm run shots`.
import { dirname, join, resolve } from "node:path";
import { fileURLToPath } from "node:url";
import { MISSING, World } from "./world.mjs";

const DOCS = resolve(dirname(fileURLToPath(import.meta.url)), "../../docs");

if (MISSING) throw new Error(MISSING);
const world = await World.start({ disks: ["web-1", "web-2", "db-1", "mail-1", "build-1"] });
try {
  for (const disk of ["web-1", "db-1", "web-2"]) await world.load(disk, 8000);
  for (const [scheme, disk] of [["light", "web-1"], ["dark", "db-1"]]) {
    const page = await world.page({ colorScheme: scheme });
    // Requests while it is open, so that there are lines.
    let enough = false;
    const busy = (async () => {
      while (!enough) for (const name of [disk, "web-2", "mail-1"]) await world.load(name, 1500);
    })();
    await page.locator(".chart tbody tr").nth(39).waitFor({ state: "attached", timeout: 120000 });
    // Each of the four tables has ten rows at most; twice as many points make a line.
    await new Promise((go) => setTimeout(go, 20000));
    const shot = async (path, name, heading) => {
      await page.evaluate((to) => (location.hash = `#/${to}`), path);
      await page.getByRole("heading", { level: 1, name: heading }).waitFor();
      await page.locator("main .loading").first().waitFor({ state: "detached" });
      await page.screenshot({ path: join(DOCS, `console-${name}-${scheme}.png`), fullPage: path.startsWith("disks/") });
    };
    await shot("", "overview", "Overview");
    if (scheme === "light") await shot("disks", "disks", "Disks");
    await shot(`disks/${disk}`, "disk", disk);
    enough = true;
    await busy;
    await page.context().close();
  }
} finally {
  await world.end();
}
