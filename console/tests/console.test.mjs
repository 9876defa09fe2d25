// The console as somebody uses it: a real daemon, real requests, a real browser.
import assert from "node:assert/strict";
import { execFile, spawn } from "node:child_process";
import { stat } from "node:fs/promises";
import { createServer, get } from "node:http";
import { hostname } from "node:os";
import { join } from "node:path";
import { promisify } from "node:util";
import { gunzipSync } from "node:zlib";
import { after, before, describe, test } from "node:test";
import { accessible, go, looks, refresh, refreshed } from "./common.mjs";
import { loaded, MISSING, until, World } from "./world.mjs";

const PAGES = [
  ["", "Overview"],
  ["disks", "Disks"],
  ["disks/web-1", "web-1"],
  ["add", "Add a disk"],
  ["devices", "Devices"],
  ["events", "Events"],
  ["alerts", "Alerts"],
  ["advice", "Advice"],
];

describe("the console", { skip: MISSING ?? false, timeout: 300000 }, () => {
  let world;
  let received;
  let listening;
  before(async () => {
    // The receiver of the webhook.
    received = [];
    listening = createServer((asked, answer) => {
      const parts = [];
      asked.on("data", (part) => parts.push(part));
      asked.on("end", () => {
        received.push(JSON.parse(Buffer.concat(parts).toString()));
        answer.end();
      });
    });
    await new Promise((up) => listening.listen(0, "127.0.0.1", up));
    const url = `http://127.0.0.1:${listening.address().port}/hook`;
    world = await World.start({ accounts: [["board", "viewer"]], config: `[alerts]\ngather_seconds = 0\n[alerts.webhook]\nurl = "${url}"\n` });
    await world.load("web-1");
    await world.load("db-1", 1000);
    await world.hearth(["disk", "flush", "web-1"]);
  });
  after(async () => {
    await world?.end();
    listening?.close();
  });

  test("a link logs in once", async () => {
    const link = await world.link();
    const context = await world.context();
    const first = await context.newPage();
    await first.goto(link);
    await first.getByRole("heading", { name: "Overview" }).waitFor();
    assert.ok(!first.url().includes(link.split("/").pop()), "the secret stays in the address");
    const again = await (await world.context()).newPage();
    await again.goto(link);
    await again.getByText("used up").waitFor();
    await again.getByLabel("Account").waitFor();
    // Another tab of the same browser is logged in.
    const second = await context.newPage();
    await second.goto(world.url);
    await second.getByRole("heading", { name: "Overview" }).waitFor();
    await second.getByRole("button", { name: "Log out" }).click();
    await second.getByLabel("Account").waitFor();
    await first.getByLabel("Account").waitFor();
  });

  test("an account logs in only with the right password", async () => {
    const page = await (await world.context()).newPage();
    await page.goto(world.url);
    await page.getByLabel("Account").fill("board");
    await page.getByLabel("Password").fill("not the password");
    await page.getByRole("button", { name: "Log in" }).click();
    await page.getByRole("alert").waitFor();
    await page.getByLabel("Password").fill(World.password);
    await page.keyboard.press("Enter");
    await page.getByText("board (viewer)").waitFor();
  });

  looks(test, () => world, PAGES);

  test("the overview shows measured latencies and request rates", async () => {
    const page = await world.page();
    await page.locator(".verdict").getByText(/times slower/).waitFor();
    await page.getByLabel("Show").selectOption("now");
    await page.getByRole("img", { name: /Hit ratio: Read hits/ }).waitFor();
    await world.load("web-1", 1000);
    await refreshed(page.getByRole("img", { name: /Requests: Reads [1-9]/ }));
  });

  test("title and head name the host", async () => {
    const page = await world.page();
    const host = hostname();
    await page.locator("nav .brand").getByText(host, { exact: true }).waitFor();
    assert.equal(await page.title(), `Overview – ${host} – Hearth`);
    await go(page, "disks/web-1", "web-1");
    await until("the title is that of the disk", async () => (await page.title()) === `web-1 – ${host} – Hearth`);
  });

  test("charts begin with the recorded last hour", async () => {
    const page = await world.page();
    for (const [path, heading] of [["", "Overview"], ["disks/web-1", "web-1"]]) {
      await go(page, path, heading);
      assert.equal(await page.getByLabel("Show").first().inputValue(), "hour");
      // The requests of before the page was opened, in slots of ten seconds.
      await refreshed(page.getByRole("img", { name: /Hit ratio: Read hits \d/ }));
    }
  });

  test("the overview asks for no list of disks", async () => {
    const page = await world.page();
    const answered = (path) => page.waitForResponse((r) => r.url().endsWith(path) && r.ok());
    const names = async (answer) => (await (await answer).json()).disks.map((d) => d.name);
    const asked = [];
    const note = (request) => asked.push(new URL(request.url()).pathname);
    page.on("request", note);
    await loaded(page);
    await page.getByRole("heading", { name: "Flash" }).waitFor();
    const [totals, health] = [answered("/v1/stats?disks=false"), answered("/v1/health")];
    await refresh(page);
    assert.deepEqual(await names(totals), []);
    for (const answer of [totals, health]) assert.equal((await answer).headers()["content-encoding"], "gzip");
    assert.ok(!asked.includes("/v1/disks"), asked.join(" "));
    page.off("request", note);
    // The page of disks needs each.
    const each = answered("/v1/stats");
    await go(page, "disks", "Disks");
    assert.deepEqual((await names(each)).sort(), ["db-1", "mail-1", "web-1"]);
  });

  test("unknown drives are no warning on the overview", async () => {
    const page = await world.page();
    const unknown = { kind: "device", name: "vda", condition: "unknown", reasons: [{ code: "no-smart", condition: "unknown", what: "the drive reports no SMART data", remedy: "none" }] };
    const judged = (items, condition = "healthy") => ({
      status: 200,
      contentType: "application/json",
      body: JSON.stringify({ at: Date.now(), condition, items }),
    });
    await page.route("**/v1/health", (route) => route.fulfill(judged([unknown])));
    await loaded(page);
    const health = page.getByRole("region", { name: "Health", exact: true });
    await health.getByText("Nothing is wrong.").waitFor();
    assert.equal(await health.locator("strong").count(), 0);
    // A drive that reports a fault is one.
    const failing = { ...unknown, condition: "failed", reasons: [{ code: "smart", condition: "failed", what: "the drive is failing", remedy: "replace it" }] };
    await page.unroute("**/v1/health");
    await page.route("**/v1/health", (route) => route.fulfill(judged([unknown, failing], "failed")));
    await refreshed(health.locator("strong").getByText("The drive is failing."));
    assert.equal(await health.locator("strong").count(), 1);
    await page.unroute("**/v1/health");
  });

  test("disks are filtered and sorted with the keyboard", async () => {
    const page = await world.page();
    await go(page, "disks", "Disks");
    const rows = page.locator("tbody tr");
    await until("three rows", async () => (await rows.count()) === 3);
    await page.getByRole("searchbox").fill("web");
    await until("one row", async () => (await rows.count()) === 1);
    await page.getByRole("searchbox").fill("");
    const name = page.getByRole("columnheader", { name: "Name" });
    assert.equal(await name.getAttribute("aria-sort"), "ascending");
    assert.match(await rows.first().innerText(), /^db-1/);
    await name.getByRole("button").focus();
    await page.keyboard.press("Enter");
    assert.equal(await name.getAttribute("aria-sort"), "descending");
    await until("the other order", async () => /^web-1/.test(await rows.first().innerText()));
    await rows.first().getByRole("link").focus();
    await page.keyboard.press("Enter");
    await page.getByRole("heading", { level: 1, name: /web-1/ }).waitFor();
    // It is given after the page was drawn.
    await until("the new page has the focus", () => page.evaluate(() => document.activeElement?.id === "main"));
  });

  test("sort and filter outlast the page", async () => {
    const page = await world.page();
    await go(page, "disks", "Disks");
    const rows = page.locator("tbody tr");
    const size = page.getByRole("columnheader", { name: "Size" });
    const filter = page.getByRole("searchbox");
    const isKept = async (what) => {
      await until(`one row ${what}`, async () => (await rows.count()) === 1);
      assert.equal(await filter.inputValue(), "db", what);
      assert.equal(await size.getAttribute("aria-sort"), "descending", what);
    };
    await size.getByRole("button").click();
    await filter.fill("db");
    await isKept("when chosen");
    await rows.first().getByRole("link").click();
    await page.getByRole("heading", { level: 1, name: /db-1/ }).waitFor();
    await page.goBack();
    await isKept("after a look at a disk");
    await loaded(page);
    await isKept("after a reload");
    await filter.fill("");
    await page.getByRole("columnheader", { name: "Name" }).getByRole("button").click();
  });

  test("an operator adds a disk, changes it, flushes and removes it", async () => {
    const page = await world.page();
    await go(page, "add", "Add a disk");
    await page.getByRole("button", { name: /vms$|vms\/$/ }).click();
    await page.getByRole("button", { name: "more/" }).click();
    await page.getByRole("button", { name: "deep.raw" }).waitFor();
    await page.getByRole("button", { name: "Up" }).click();
    await page.getByRole("button", { name: "new.raw" }).click();
    assert.equal(await page.getByLabel("Name").inputValue(), "new");
    const what = page.getByRole("status", { name: "What was found" });
    await what.getByText("a file").waitFor();
    await what.getByText("nothing that Hearth knows").waitFor();
    await accessible(page, "what was found");
    await page.getByLabel("Cache mode").selectOption("write-through");
    await page.getByRole("button", { name: "Add", exact: true }).click();
    await page.getByText("is attached").waitFor();
    await page.getByText("What to type").click();
    await page.getByText("export=new").first().waitFor();
    await page.context().grantPermissions(["clipboard-read", "clipboard-write"]);
    await page.getByRole("button", { name: "Copy" }).first().click();
    await page.getByText("Copied").waitFor();
    const typed = await page.locator("pre").first().innerText();
    assert.equal((await page.evaluate(() => navigator.clipboard.readText())).trim(), typed.trim());
    await page.getByRole("link", { name: "new", exact: true }).click();
    await page.getByRole("heading", { level: 1, name: /new/ }).waitFor();
    await page.getByLabel("Most flash it may use").fill("32M");
    await page.getByRole("button", { name: "Save" }).click();
    await page.getByText("Saved.").waitFor();
    const shown = JSON.parse(await world.hearth(["disk", "show", "new", "--json"]));
    assert.equal(shown.max, 32 << 20);
    assert.equal(shown.mode, "write-through");
    // Others change settings while the form is open: what they did is not reverted, and the change is refused once.
    await page.getByLabel("Clients at a time").fill("3");
    await world.hearth(["disk", "set", "new", "--max", "48M"]);
    // The form stays closed until the new settings are shown: another attempt would be based on the old ones.
    let answer;
    const held = new Promise((resolve) => (answer = resolve));
    const shownDisk = (url) => url.pathname.endsWith("/disks/new");
    await page.route(shownDisk, async (route) => {
      if (route.request().method() === "GET") await held;
      await route.continue();
    });
    await page.getByRole("button", { name: "Save" }).click();
    await page.getByText("were changed meanwhile").waitFor();
    assert.ok(await page.getByLabel("Clients at a time").isDisabled());
    answer();
    await page.unrouteAll({ behavior: "wait" });
    assert.match(page.wrong.splice(0).join(), /409/);
    const kept = await world.asked("disk", "show", "new");
    assert.deepEqual([kept.max, kept.client_limit], [48 << 20, 0]);
    await page.getByLabel("Clients at a time").fill("3");
    await page.getByRole("button", { name: "Save" }).click();
    await page.getByText("Saved.").waitFor();
    const both = await world.asked("disk", "show", "new");
    assert.deepEqual([both.max, both.client_limit], [48 << 20, 3]);
    await page.getByLabel("Most flash it may use").fill("much");
    await page.getByRole("button", { name: "Save" }).click();
    await page.getByText("is no size").waitFor();
    await page.getByRole("button", { name: "As it was" }).click();
    await page.getByRole("button", { name: "Flush" }).click();
    // Enter twice does nothing: the dialog does not begin at the dangerous button.
    await page.getByRole("button", { name: "Remove…" }).press("Enter");
    await page.getByRole("dialog").getByRole("button", { name: "Remove" }).waitFor();
    await page.keyboard.press("Enter");
    await page.getByRole("dialog").waitFor({ state: "hidden" });
    await page.getByRole("button", { name: "Remove…" }).click();
    await page.getByRole("dialog").getByRole("button", { name: "Remove" }).click();
    await refreshed(page.getByText("There is nothing here"));
    await until("it is gone", async () => !JSON.parse(await world.hearth(["disk", "list", "--json"])).some((d) => d.name === "new"));
    // And what was done stands in the events.
    await go(page, "events", "Events");
    await page.getByText("disk-added").first().waitFor();
    assert.deepEqual(page.wrong, []);
  });

  test("the remove dialog names the client and begins harmless", async () => {
    // A guest that has the disk open until its input ends.
    const guest = spawn("qemu-io", ["-f", "raw", `nbd+unix:///mail-1?socket=${world.run}/nbd.sock`], { stdio: ["pipe", "ignore", "inherit"] });
    const gone = new Promise((resolve) => guest.once("exit", resolve));
    try {
      await until("the guest is a client", async () => (await world.asked("disk", "show", "mail-1")).clients?.length === 1);
      const page = await world.page();
      await go(page, "disks/mail-1", "mail-1");
      const dialog = page.getByRole("dialog");
      await page.getByRole("button", { name: "Remove…" }).press("Enter");
      await dialog.getByText(/qemu-io.* uses it now/).waitFor();
      assert.equal(await page.evaluate(() => document.activeElement?.textContent), "Keep it");
      await accessible(page, "the dialog with a client");
      await page.keyboard.press("Enter");
      await dialog.waitFor({ state: "hidden" });
      assert.deepEqual((await world.asked("disk", "show", "mail-1")).clients.length, 1);
      assert.deepEqual(page.wrong, []);
    } finally {
      guest.stdin.end("quit\n");
      await gone;
    }
  });

  test("requests are recorded only below an allowed directory", async () => {
    const page = await world.page();
    await go(page, "disks/db-1", "db-1");
    const card = page.getByRole("region", { name: "Recording", exact: true });
    await card.getByText("Its requests are not recorded.").waitFor();
    await card.getByText("Record", { exact: true }).click();
    await card.getByLabel("File on the host").fill("/etc/db-1.trace");
    await card.getByRole("button", { name: "Begin" }).click();
    await card.getByText("not below a directory you may reach").waitFor();
    const file = join(world.vms, "db-1.trace");
    await card.getByLabel("File on the host").fill(file);
    await card.getByRole("button", { name: "Begin" }).click();
    await card.getByText("Recording into").waitFor();
    await world.load("db-1", 500);
    await refreshed(card.getByText(/: [1-9][0-9 ,.k]* requests/));
    await card.getByRole("button", { name: "Stop" }).click();
    await card.getByText("Recorded into").waitFor();
    assert.ok((await stat(file)).size > 0);
  });

  test("a test alert is delivered", async () => {
    const page = await world.page();
    await go(page, "alerts", "Alerts");
    await page.getByRole("button", { name: "Send a test" }).click();
    await page.getByText("A test is on its way: webhook").waitFor();
    await until("the test alert is received", () => received.some((message) => message.entries.some((entry) => entry.news === "test")));
    await refreshed(page.getByText("everything has arrived"));
    assert.deepEqual(page.wrong, []);
    const viewer = await world.page({ role: "viewer" });
    await go(viewer, "alerts", "Alerts");
    await viewer.getByRole("heading", { name: "Ways" }).waitFor();
    assert.equal(await viewer.getByRole("button", { name: "Send a test" }).count(), 0);
  });

  test("an image format is detected and backing files are rejected", async () => {
    const odd = join(world.vms, "odd.raw");
    const over = join(world.vms, "over.qcow2");
    const make = (...args) => promisify(execFile)("qemu-img", ["create", "-q", ...args]);
    await make("-f", "qcow2", odd, "48M");
    await make("-f", "qcow2", "-u", "-b", "/etc/passwd", "-F", "raw", over, "48M");
    const page = await world.page();
    await go(page, "add", "Add a disk");
    const origin = page.getByLabel("File, device or address");
    const add = page.getByRole("button", { name: "Add", exact: true });
    await origin.fill(odd);
    await page.getByRole("button", { name: "Look at it" }).click();
    const what = page.getByRole("status", { name: "What was found" });
    await what.getByText("its format was not given").waitFor();
    assert.equal(await add.isDisabled(), true);
    await what.getByRole("button", { name: "Take the disk in it" }).click();
    await what.getByText("an image, qcow2").waitFor();
    await what.getByText("48 MiB").waitFor();
    assert.equal(await origin.inputValue(), `qcow2:${odd}`);
    assert.equal(await add.isDisabled(), false);
    await origin.fill(`qcow2:${over}`);
    // What was found in another is not this one's.
    assert.equal(await what.count(), 0);
    await page.getByRole("button", { name: "Look at it" }).click();
    await what.getByText("names another file of this host, /etc/passwd").waitFor();
    assert.equal(await add.isDisabled(), true);
  });

  test("a path outside the allowed directories is rejected", async () => {
    const page = await world.page();
    await go(page, "add", "Add a disk");
    await page.getByLabel("File, device or address").fill("/etc/hostname");
    await page.getByLabel("Name").fill("stolen");
    await page.getByRole("button", { name: "Look at it" }).click();
    await page.getByText("not below a directory you may reach").waitFor();
  });

  test("a viewer has no controls that change anything", async () => {
    const page = await world.page({ role: "viewer" });
    await go(page, "disks", "Disks");
    assert.equal(await page.getByRole("link", { name: "Add a disk" }).count(), 0);
    await go(page, "disks/web-1", "web-1");
    await page.getByText("An operator can change them").waitFor();
    for (const name of ["Flush", "Remove…", "Save", "Begin anew", "Begin"]) {
      assert.equal(await page.getByRole("button", { name, exact: true }).count(), 0, name);
    }
    await go(page, "add", "Add a disk");
    await page.getByText("You may not do this").waitFor();
  });

  test("the slider of the curve shows the effect of a size", async () => {
    await world.load("web-1", 20000);
    const page = await world.page();
    await go(page, "disks/web-1", "web-1");
    const handle = page.getByRole("slider");
    await refreshed(handle);
    const expected = page.locator("[data-test=expected]");
    const spoken = () => handle.getAttribute("aria-valuetext");
    await handle.focus();
    await page.keyboard.press("Home");
    await until("nothing is kept", async () => (await expected.innerText()).startsWith("With 0 B"));
    await page.keyboard.press("End");
    await until("all is kept", async () => !(await expected.innerText()).startsWith("With 0 B"));
    // One step is a little less; what is said aloud is what is shown.
    const most = await expected.innerText();
    const all = Number(await handle.inputValue());
    await page.keyboard.press("ArrowLeft");
    await until("it is a step less", async () => Number(await handle.inputValue()) < all);
    assert.match(await spoken(), /^[0-9.]+ (KiB|MiB): [0-9.]+ % hits, [0-9.]+ (µs|ms) a read$/);
    assert.ok((await expected.innerText()).includes((await spoken()).split(":")[0]));
    await page.keyboard.press("End");
    await until("it is all again", async () => (await expected.innerText()) === most);
    const box = await page.locator(".curve svg").boundingBox();
    await page.mouse.move(box.x + box.width - 10, box.y + 50);
    await page.mouse.down();
    await page.mouse.move(box.x + box.width / 3, box.y + 50);
    await page.mouse.up();
    await until("it was dragged", async () => (await expected.innerText()) !== most);
    // Where it was let go, a third of the picture, both say the same.
    const [now, whole] = [Number(await handle.inputValue()), Number(await handle.getAttribute("max"))];
    assert.ok(now > whole * 0.15 && now < whole * 0.45, `${now} of ${whole}`);
    await page.mouse.move(box.x + 5, box.y + 50);
    assert.equal(Number(await handle.inputValue()), now, "it moved without being held");
  });

  test("shares of the flash are shown and applied", async () => {
    const page = await world.page();
    await go(page, "advice", "Advice");
    const row = page.getByRole("row", { name: /^web-1/ });
    await until("its share is known", async () => /[0-9] (KiB|MiB)/.test(await row.getByRole("cell").nth(3).innerText()));
    await page.getByRole("button", { name: "Apply" }).click();
    await page.getByText(/^Kept: .*web-1 [0-9.]+ (KiB|MiB)/).waitFor();
    await until("it is kept", async () => (await world.asked("disk", "show", "web-1")).share > 0);
    await accessible(page, "applied advice");
    assert.deepEqual(page.wrong, []);
    const viewer = await world.page({ role: "viewer" });
    await go(viewer, "advice", "Advice");
    await viewer.getByRole("row", { name: /^web-1/ }).waitFor();
    assert.equal(await viewer.getByRole("button", { name: "Apply" }).count(), 0);
  });

  test("the page is at most 200 KiB of own files", async (t) => {
    // As it comes over the wire: nothing is unpacked.
    const fetched = (path) =>
      new Promise((resolve, failed) => {
        const asked = get(new URL(path, world.url), { headers: { "accept-encoding": "gzip" } }, (answer) => {
          const parts = [];
          answer.on("data", (part) => parts.push(part));
          answer.on("end", () => resolve({ packed: answer.headers["content-encoding"] === "gzip", data: Buffer.concat(parts) }));
        });
        asked.on("error", failed);
      });
    const first = await fetched("/");
    assert.ok(first.packed);
    const named = [...gunzipSync(first.data).toString().matchAll(/(?:src|href)="(\/[^"]+)"/g)].map((found) => found[1]);
    assert.ok(named.some((path) => path.endsWith(".js")) && named.some((path) => path.endsWith(".css")), named.join(" "));
    let bytes = first.data.length;
    for (const path of named) {
      const part = await fetched(path);
      assert.ok(part.packed, path);
      bytes += part.data.length;
    }
    t.diagnostic(`${named.length + 1} files, ${bytes} bytes, compressed`);
    assert.ok(bytes <= 200 * 1024, `${bytes} bytes`);
    // Nothing else is fetched for it, on whichever page.
    // Its times are those of the browser: the clock of the page is not replaced.
    const page = await world.page({ clock: false });
    const asked = [];
    page.on("request", (r) => asked.push(new URL(r.url()).pathname));
    await page.reload();
    await page.getByRole("heading", { name: "Flash" }).waitFor();
    const rest = asked.filter((path) => path !== "/" && !named.includes(path) && !/^\/(v1|console)\//.test(path));
    assert.deepEqual(rest, []);
    const [{ startTime }] = await page.evaluate(() => performance.getEntriesByName("first-contentful-paint").map((e) => e.toJSON()));
    t.diagnostic(`first content after ${Math.round(startTime)} ms`);
  });

  test("markup in names is shown as text", async () => {
    const page = await world.page();
    page.on("dialog", () => page.wrong.push("a dialog"));
    await go(page, "devices", "Devices");
    await page.getByText("<script>alert(1)</script>").waitFor();
    await page.evaluate(() => (location.hash = "#/disks/" + encodeURIComponent("<img src=x onerror=alert(1)>")));
    await page.getByText("There is nothing here").waitFor();
    assert.equal(await page.locator("main img, main script").count(), 0);
    assert.deepEqual(page.wrong, []);
  });

  test("another origin cannot use the session", async () => {
    const page = await world.page();
    const { cookie } = await page.context().cookies().then(([c]) => ({ cookie: c }));
    assert.equal(cookie.httpOnly, true);
    assert.equal(cookie.sameSite, "Strict");
    // Another server on the same host has the same cookies; a page of it has no more than those.
    const other = createServer((_, response) => response.setHeader("content-type", "text/html").end("<p>other</p>"));
    await new Promise((listening) => other.listen(0, "127.0.0.1", listening));
    try {
      const evil = await page.context().newPage();
      await evil.goto(`http://127.0.0.1:${other.address().port}/`);
      const got = await evil.evaluate(async (url) => {
        const tries = [];
        const note = (p) => p.then((r) => tries.push(`${r.type} ${r.status}`), () => tries.push("failed"));
        await note(fetch(`${url}v1/pool`, { credentials: "include" }));
        await note(fetch(`${url}v1/disks/web-1/remove`, { method: "POST", mode: "no-cors", credentials: "include", body: '{"yes":true}' }));
        await new Promise((done) => {
          const stream = new EventSource(`${url}v1/events`, { withCredentials: true });
          stream.onopen = () => done(tries.push("stream"));
          stream.onerror = () => done(tries.push("failed"), stream.close());
        });
        await new Promise((done) => {
          const socket = new WebSocket(`${url.replace("http", "ws")}v1/events`);
          socket.onopen = () => done(tries.push("socket"));
          socket.onerror = () => done(tries.push("failed"));
        });
        return tries;
      }, world.url);
      assert.deepEqual(got, ["failed", "failed", "failed", "failed"]);
    } finally {
      other.close();
    }
    const disks = JSON.parse(await world.hearth(["disk", "list", "--json"]));
    assert.equal(disks.find((d) => d.name === "web-1").state, "attached");
  });

  test("the page recovers after a restart of the daemon", async () => {
    const page = await world.page();
    await world.stop(world.daemon);
    await refreshed(page.getByText("it is asked again by itself"));
    await page.getByText("no daemon is serving the pool").waitFor();
    await accessible(page, "without a daemon");
    const fresh = await world.page({ role: "viewer" });
    await fresh.getByText("Waiting for the daemon").waitFor();
    await world.serve();
    for (const p of [page, fresh]) {
      await refreshed(p.getByText("it is asked again by itself"), "detached");
      await refreshed(p.getByRole("heading", { name: "Flash" }));
    }
  });

  test("a flush shows its progress and can be cancelled", async () => {
    await world.image("slow.raw", 64 << 20);
    await world.hearth(["disk", "add", "slow", "--origin", `model-latency=20s:${world.vms}/slow.raw`]);
    // At this distance each is written back by a request of its own. The origin is so slow that the flush cannot end
    // before it is cancelled.
    const writes = Array.from({ length: 64 }, (_, n) => ["-c", `write -P ${n + 1} ${n}M 4k`]).flat();
    await promisify(execFile)("qemu-io", ["-f", "raw", ...writes, "-c", "flush", `nbd+unix:///slow?socket=${world.run}/nbd.sock`]);
    const page = await world.page();
    await go(page, "disks/slow", "slow");
    await page.getByRole("button", { name: "Flush" }).click();
    await refreshed(page.getByText("flushing", { exact: true }));
    await refreshed(page.getByRole("progressbar", { name: /^flushing: .* left/ }));
    await accessible(page, "a flush");
    await page.getByRole("button", { name: "Call it off" }).click();
    await refreshed(page.getByText("attached", { exact: true }));
    await page.getByRole("button", { name: "Flush" }).waitFor();
    assert.ok((await world.asked("disk", "show", "slow")).dirty > 0, "no dirty data was left when the flush was cancelled");
    await go(page, "events", "Events");
    await page.getByText("disk-flush-cancelled").first().waitFor();
    assert.deepEqual(page.wrong, []);
    // A clean stop would wait for the origin.
    await world.kill(world.daemon);
  });
});
