// What tests of the console do to pages.
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";

const AXE = readFileSync(createRequire(import.meta.url).resolve("axe-core/axe.min.js"), "utf8");

/** How a page is looked at: each of them by everybody. */
export const LOOKS = [
  ["light", {}],
  ["dark", { colorScheme: "dark" }],
  ["on a phone", { viewport: { width: 360, height: 740 }, hasTouch: true, isMobile: true }],
  ["for a viewer", { role: "viewer" }],
];

/** No violation of what a screen reader, a keyboard or weak eyes need. */
export async function accessible(page, what) {
  // The policy of the page lets in no script; the tool comes by the debugger's way.
  await page.evaluate(AXE);
  const { violations } = await page.evaluate(() => window.axe.run(document, { resultTypes: ["violations"] }));
  const told = violations.map((v) => `${v.id}: ${v.nodes.map((n) => n.html).join(" ; ").slice(0, 400)}`);
  assert.deepEqual(told, [], what);
}

export async function go(page, path, heading) {
  await page.evaluate((to) => (location.hash = `#/${to}`), path);
  await page.getByRole("heading", { level: 1, name: heading }).waitFor();
}

/** Each page is whole, as wide as the screen and no wider, and nobody is shut out of it. */
export async function every(page, pages, what) {
  for (const [path, heading] of pages) {
    await go(page, path, heading);
    await page.locator("main .loading").first().waitFor({ state: "detached" });
    await accessible(page, `${heading}, ${what}`);
    const wide = await page.evaluate(() => document.documentElement.scrollWidth - innerWidth);
    assert.ok(wide <= 0, `${heading} is ${wide} pixels too wide, ${what}`);
  }
  assert.deepEqual(page.wrong, []);
}
