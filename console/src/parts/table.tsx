// A table that can be sorted and searched, for five hundred rows.
//
// Rows that are far out of sight are laid out by the browser only when they come near (`content-visibility`), and a
// row is made anew only if something in it changed.
import type { ComponentChildren } from "preact";
import { useEffect, useMemo, useState } from "preact/hooks";

export interface Column<T> {
  name: string;
  /** What it is sorted by. */
  by: (row: T) => string | number | null;
  /** What is shown. */
  show: (row: T) => ComponentChildren;
  number?: boolean;
  /** Left out where there is little room. */
  wide?: boolean;
}

/** How a table is looked at. It outlasts the page, in this tab of the browser. */
interface View {
  by: string;
  down: boolean;
  wanted: string;
}

const key = (caption: string) => `table ${caption}`;

function keptView(caption: string): View | null {
  try {
    const { by, down, wanted } = JSON.parse(sessionStorage.getItem(key(caption)) ?? "{}");
    return typeof by === "string" && typeof wanted === "string" ? { by, down: down === true, wanted } : null;
  } catch {
    return null;
  }
}

export function Table<T>({
  caption,
  columns,
  rows,
  id,
  search,
  first,
}: {
  caption: string;
  columns: Column<T>[];
  rows: T[];
  id: (row: T) => string;
  /** What a search looks at; no search without. */
  search?: (row: T) => string;
  /** The column it is sorted by at first. */
  first?: string;
}) {
  const [view, setView] = useState<View>(() => keptView(caption) ?? { by: first ?? columns[0]!.name, down: false, wanted: "" });
  useEffect(() => sessionStorage.setItem(key(caption), JSON.stringify(view)), [view]);
  const shown = useMemo(() => {
    const words = view.wanted.toLowerCase().split(/\s+/).filter(Boolean);
    const kept = search ? rows.filter((r) => words.every((w) => search(r).toLowerCase().includes(w))) : [...rows];
    const column = columns.find((c) => c.name === view.by) ?? columns[0]!;
    const order = view.down ? -1 : 1;
    return kept.sort((a, b) => {
      const [x, y] = [column.by(a), column.by(b)];
      // What is not known comes last, whichever way.
      if (x === null || y === null) return x === y ? 0 : x === null ? 1 : -1;
      return order * (typeof x === "string" ? x.localeCompare(String(y), "en", { numeric: true }) : x - Number(y));
    });
  }, [rows, columns, view, search]);
  const sort = ({ name, number }: Column<T>) =>
    setView((was) => ({ ...was, by: name, down: was.by === name ? !was.down : !!number }));
  return (
    <div class="table">
      {search && (
        <div class="tools">
          <input
            type="search"
            placeholder="Filter"
            aria-label={`Filter: ${caption}`}
            value={view.wanted}
            onInput={(e) => {
              const wanted = e.currentTarget.value;
              setView((was) => ({ ...was, wanted }));
            }}
          />
          <span role="status">
            {shown.length === rows.length ? rows.length : `${shown.length} of ${rows.length}`}
          </span>
        </div>
      )}
      <div class="scroll" tabIndex={0} role="region" aria-label={caption}>
        <table>
          <caption class="hidden">{caption}</caption>
          <thead>
            <tr>
              {columns.map((c) => (
                <th
                  key={c.name}
                  scope="col"
                  class={`${c.number ? "number" : ""} ${c.wide ? "wide" : ""}`}
                  aria-sort={view.by === c.name ? (view.down ? "descending" : "ascending") : "none"}
                >
                  <button type="button" onClick={() => sort(c)}>
                    {c.name}
                    <span aria-hidden="true">{view.by === c.name ? (view.down ? " ▾" : " ▴") : ""}</span>
                  </button>
                </th>
              ))}
            </tr>
          </thead>
          <tbody>
            {shown.map((row) => (
              <tr key={id(row)}>
                {columns.map((c) => (
                  <td key={c.name} class={`${c.number ? "number" : ""} ${c.wide ? "wide" : ""}`}>
                    {c.show(row)}
                  </td>
                ))}
              </tr>
            ))}
          </tbody>
        </table>
        {shown.length === 0 && <p class="empty">Nothing fits.</p>}
      </div>
    </div>
  );
}
