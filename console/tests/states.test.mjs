// The states a page can be in besides that it shows something: it loads, the daemon is gone, the answer is an error, somebody may
// not see it, there is nothing. Each is drawn on every page, can be used without eyes, and gives way to the thing itself when
// that is there. What the daemon answers is taken from it on its way to the browser; all else is real.
import assert from "node:assert/strict";
import { mkdir } from "node:fs/promises";
import { join } from "node:path";
import { after, before, describe, test } from "node:test";
import { accessible, go, refreshed } from "./common.mjs";
import { loaded, MISSING, World } from "./world.mjs";

const PAGES = [
  ["", "Overview"],
  ["disks", "Disks"],
  ["disks/web-1", "web-1"],
  ["add", "Add a disk"],
  ["datastores", "Datastores"],
  ["datastores/store", "store"],
  ["devices", "Devices"],
  ["memory", "Memory"],
  ["events", "Events"],
  ["alerts", "Alerts"],
  ["advice", "Advice"],
];

/** What is asked of the daemon, of the second service, and of the console about files. */
const ASKED = /\/(v1|console\/(browse|attach|mount))\//;
const BROWSED = /\/console\/browse/;

const json = (status, body) => (route) => route.fulfill({ status, contentType: "application/json", body: JSON.stringify(body) });

describe("states of pages", { skip: MISSING ?? false, timeout: 600000 }, () => {
  let world;
  before(async () => {
    world = await World.start({ disks: ["web-1"] });
    await world.load("web-1");
  });
  after(() => world?.end());

  /** A page that has been answered nothing yet, and whose answers are what `answer` makes of them. */
  const opened = async (answer) => {
    const page = await world.page();
    await page.route(ASKED, answer);
    await page.route(BROWSED, answer);
    await loaded(page);
    return page;
  };
  const freed = async (page) => {
    await page.unroute(ASKED);
    await page.unroute(BROWSED);
  };
  const main = (page) => page.locator("main");

  test("loading", async () => {
    const held = [];
    const page = await opened((route) => void held.push(route));
    for (const [path, heading] of PAGES) {
      await go(page, path, heading);
      await main(page).getByRole("status").getByText("Loading…").first().waitFor();
      await accessible(page, `${heading}, loading`);
    }
    await freed(page);
    for (const route of held) await route.continue().catch(() => {});
    await main(page).getByText("Loading…").first().waitFor({ state: "detached" });
    await page.getByRole("region", { name: "Shares", exact: true }).waitFor();
  });

  test("the daemon is unreachable", async () => {
    const page = await opened(json(503, { error: "no daemon is serving the pool", remedy: "start it" }));
    for (const [path, heading] of PAGES) {
      await go(page, path, heading);
      await main(page).getByRole("alert").filter({ hasText: "It is asked again by itself" }).waitFor();
      await main(page).getByRole("status").getByText("Waiting for the daemon…").first().waitFor();
      await accessible(page, `${heading}, without a daemon`);
    }
    await freed(page);
    await refreshed(main(page).getByText("asked again by itself"), "detached");
    await refreshed(page.getByRole("region", { name: "Shares", exact: true }));
  });

  test("an error with its remedy", async () => {
    const page = await opened(json(500, { error: "the disk is upside down", remedy: "turn it over" }));
    for (const [path, heading] of PAGES) {
      await go(page, path, heading);
      const said = main(page).getByRole("alert").first();
      await said.getByText("the disk is upside down").waitFor();
      await said.getByText("Turn it over.").waitFor();
      // Its parts are answered one after the other.
      await main(page).getByText("Loading…").first().waitFor({ state: "detached" });
      await accessible(page, `${heading}, an error`);
    }
    await freed(page);
    await refreshed(page.getByRole("region", { name: "Shares", exact: true }));
    await refreshed(main(page).getByText("upside down"), "detached");
  });

  test("no permission", async () => {
    const page = await opened(json(403, { error: "an operator may", remedy: "log in as an operator" }));
    for (const [path, heading] of PAGES) {
      await go(page, path, heading);
      await main(page).getByText("You may not see this.").first().waitFor();
      await main(page).getByText("Log in as an operator.").first().waitFor();
      // Its parts are answered one after the other.
      await main(page).getByText("Loading…").first().waitFor({ state: "detached" });
      await accessible(page, `${heading}, not allowed`);
    }
    const viewer = await world.page({ role: "viewer" });
    await go(viewer, "add", "Add a disk");
    await viewer.getByText("You may not do this.").waitFor();
    await accessible(viewer, "adding, for a viewer");
  });

  test("a failed part is reported and the rest is shown", async () => {
    const page = await world.page();
    const broken = /\/v1\/(health|alerts)/;
    await page.route(broken, json(500, { error: "the judge is asleep", remedy: "wake it" }));
    await loaded(page);
    await go(page, "", "Overview");
    await main(page).getByText("are not judged: the judge is asleep").waitFor();
    await page.getByRole("heading", { name: "Flash" }).waitFor();
    await go(page, "devices", "Devices");
    await page.getByRole("region", { name: "Drives, arrays and file systems" }).getByText("the judge is asleep").waitFor();
    await page.getByRole("heading", { name: "Pool" }).waitFor();
    await go(page, "events", "Events");
    await main(page).getByText("is not among them: the judge is asleep").waitFor();
    await main(page).getByText("disk-added").first().waitFor();
    await accessible(page, "events without those of alerts");
  });

  test("nothing to show", async () => {
    const page = await world.page();
    for (const [path, heading] of [["disks/none", "none"], ["datastores/none", "none"]]) {
      await go(page, path, heading);
      await main(page).getByText("There is nothing here.").waitFor();
      await accessible(page, `${path}, which is not there`);
    }
    await page.evaluate(() => (location.hash = "#/nowhere"));
    await main(page).getByText("There is no such page.").waitFor();
    const empty = await World.start({ disks: [] });
    try {
      await mkdir(join(empty.vms, "void"));
      const page = await empty.page();
      const said = [
        ["", "Overview", "Nothing was read or written yet"],
        ["disks", "Disks", "There are no disks yet."],
        ["datastores", "Datastores", "No directory is served over NFS yet."],
        ["devices", "Devices", "There are no disks yet."],
        ["memory", "Memory", "There is none. On the host"],
        ["alerts", "Alerts", "Nobody is told yet"],
        ["advice", "Advice", "There are no disks yet."],
      ];
      for (const [path, heading, text] of said) {
        await go(page, path, heading);
        await page.locator("main").getByText(text).first().waitFor();
        await accessible(page, `${heading}, empty`);
      }
      await go(page, "events", "Events");
      await page.getByLabel("At least").selectOption("error");
      await page.getByText("Nothing of that kind has happened.").waitFor();
      await accessible(page, "Events, empty");
      await go(page, "add", "Add a disk");
      await page.getByRole("button", { name: /vms$|vms\/$/ }).click();
      await page.getByRole("button", { name: "void/" }).click();
      await page.getByText("There is nothing in it.").waitFor();
      await accessible(page, "an empty directory");
      assert.deepEqual(page.wrong, []);
    } finally {
      await empty.end();
    }
  });

  test("every page asks to log in after the session ends", async () => {
    const page = await world.page({ own: true });
    const cookies = await page.context().cookies();
    const checked = new Set();
    for (const [path, heading] of PAGES) {
      await go(page, path, heading);
      await page.context().clearCookies();
      await refreshed(page.getByLabel("Account"));
      // The page to log in is the same from every page: axe checks each different document once.
      const html = await page.evaluate(() => document.documentElement.outerHTML);
      if (!checked.has(html)) await accessible(page, `${heading}, after the end of the session`);
      checked.add(html);
      await page.context().addCookies(cookies);
      await loaded(page);
    }
    await page.context().close();
  });

  test("the page reports an unreachable console and recovers", async () => {
    const page = await world.page();
    let cut = true;
    await page.route(/\/(v1|console)\//, (route) => (cut ? route.abort() : route.continue()));
    await page.reload();
    await page.getByRole("alert").filter({ hasText: "The console does not answer" }).waitFor();
    await accessible(page, "without a console");
    cut = false;
    await refreshed(page.getByRole("heading", { name: "Flash" }));
  });
});
