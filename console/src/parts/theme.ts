// Light or dark: as the system has it, unless somebody chose here.
import { useEffect, useState } from "preact/hooks";

export type Theme = "light" | "dark";
const KEPT = "hearth-theme";
const system = matchMedia("(prefers-color-scheme: dark)");
const told = new Set<() => void>();

function chosen(): Theme | null {
  const kept = localStorage.getItem(KEPT);
  return kept === "light" || kept === "dark" ? kept : null;
}

export const theme = (): Theme => chosen() ?? (system.matches ? "dark" : "light");

function apply() {
  document.documentElement.dataset.theme = theme();
  told.forEach((tell) => tell());
}

system.addEventListener("change", apply);
apply();

export function turn() {
  localStorage.setItem(KEPT, theme() === "dark" ? "light" : "dark");
  apply();
}

export function useTheme(): Theme {
  const [now, set] = useState(theme());
  useEffect(() => {
    const tell = () => set(theme());
    told.add(tell);
    return () => void told.delete(tell);
  }, []);
  return now;
}
