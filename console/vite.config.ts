// The page is small and served from inside the binary: one script, one style, and each beside its gzip form, so
// that nothing has to be compressed while somebody waits. Vite 6, because Debian 12 and Ubuntu 24.04 have Node 18.
import { readFileSync, readdirSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { gzipSync } from "node:zlib";
import { defineConfig, type Plugin } from "vite";

/** Most bytes of the whole page, compressed. */
const MOST = 200 * 1024;

function zip(dir: string): number {
  let sum = 0;
  for (const entry of readdirSync(dir, { withFileTypes: true })) {
    const path = join(dir, entry.name);
    if (entry.isDirectory()) sum += zip(path);
    else if (!path.endsWith(".gz")) {
      const packed = gzipSync(readFileSync(path), { level: 9 });
      writeFileSync(`${path}.gz`, packed);
      sum += packed.length;
    }
  }
  return sum;
}

function packed(): Plugin {
  return {
    name: "packed",
    closeBundle() {
      const sum = zip("dist");
      console.log(`the page takes ${sum} bytes, compressed, of ${MOST}`);
      if (sum > MOST) throw new Error("the page has grown too large");
    },
  };
}

export default defineConfig({
  plugins: [packed()],
  esbuild: { jsx: "automatic", jsxImportSource: "preact" },
  build: {
    target: "es2022",
    modulePreload: { polyfill: false },
    assetsInlineLimit: 0,
    sourcemap: false,
  },
});
