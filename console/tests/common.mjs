// What tests of the console do to pages.
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { loaded, until } from "./world.mjs";

const AXE = readFileSync(createRequire(import.meta.url).resolve("axe-core/axe.min.js"), "utf8");

/** Rules of axe whose result depends on the colours of a page. */
const COLOURS = ["color-contrast", "link-in-text-block"];
/** Longest interval at which a page repeats a request, in milliseconds. */
const LONGEST_INTERVAL = 15000;

/** Asserts that axe finds no violation of accessibility rules: of all its rules, or of `rules`. */
export async function accessible(page, what, rules) {
  // The content security policy of the page rejects scripts; the debugger protocol can evaluate them.
  if (!(await page.evaluate(() => "axe" in window))) await page.evaluate(AXE);
  const violations = await page.evaluate(async (rules) => {
    const options = { resultTypes: ["violations"], ...(rules && { runOnly: { type: "rule", values: rules } }) };
    const { violations } = await window.axe.run(document, options);
    return violations.map((v) => `${v.id}: ${v.nodes.map((n) => n.html).join(" ; ").slice(0, 400)}`);
  }, rules);
  assert.deepEqual(violations, [], what);
}

export async function go(page, path, heading) {
  await page.evaluate((to) => (location.hash = `#/${to}`), path);
  await page.getByRole("heading", { level: 1, name: heading }).waitFor();
}

/** Runs the timers of the page ahead: periodic requests are sent now. */
export const refresh = (page) => page.clock.fastForward(LONGEST_INTERVAL);

/**
 * Waits until `locator` is visible, or in `state`, and refreshes the page until then. For changes that the page shows
 * after a periodic request.
 */
export async function refreshed(locator, state = "visible") {
  const page = locator.page();
  const reached = () => locator.waitFor({ state, timeout: 300 }).then(() => true, () => false);
  await until(`${locator} is ${state}`, async () => (await reached()) || (await refresh(page), false));
}

/** Asserts that every page is accessible, as far as `rules` go, and no wider than the screen. */
async function every(page, pages, what, rules) {
  for (const [path, heading] of pages) {
    await go(page, path, heading);
    await page.locator("main .loading").first().waitFor({ state: "detached" });
    await accessible(page, `${heading}, ${what}`, rules);
    const wide = await page.evaluate(() => document.documentElement.scrollWidth - innerWidth);
    assert.ok(wide <= 0, `${heading} is ${wide} pixels too wide, ${what}`);
  }
  assert.deepEqual(page.wrong, []);
}

/**
 * Tests of all pages in each look. Dark colours are those of the same document in the same layout, so only the rules
 * about colours run for them. A small screen has another layout, and a viewer has other elements: there all rules run.
 */
export function looks(test, world, pages) {
  test("every page is accessible in light colours", async () => {
    const page = await world().page();
    assert.equal(await page.locator("html").getAttribute("data-theme"), "light");
    await every(page, pages, "light");
  });

  test("every page is accessible in dark colours", async () => {
    const page = await world().page();
    await page.emulateMedia({ colorScheme: "dark" });
    await loaded(page);
    assert.equal(await page.locator("html").getAttribute("data-theme"), "dark");
    await every(page, pages, "dark", COLOURS);
    await page.emulateMedia({ colorScheme: "light" });
  });

  test("every page is accessible on a small screen", async () => {
    const page = await world().page({ own: true, viewport: { width: 360, height: 740 }, hasTouch: true, isMobile: true });
    await every(page, pages, "on a small screen");
    await page.context().close();
  });

  test("every page is accessible for a viewer", async () => {
    await every(await world().page({ role: "viewer" }), pages, "for a viewer");
  });
}
