// What to type on a host for something of ours, in the words of the one who is asked: asked for when somebody opens it.
import type { ComponentChildren } from "preact";
import { useState } from "preact/hooks";
import { call, Failure } from "../api";
import { useWorld } from "../state";
import { Card, Copy, Said, sentence } from "./ui";

/** One way to do it. */
export interface Way {
  text: string;
  notes: string[];
}

export function Typed<W extends Way>({
  title,
  word,
  choices,
  path,
  ways,
  about,
}: {
  title: string;
  /** What is said before the choice. */
  word: string;
  /** For whom: what the console calls each, and what people do. The first is asked for unless another is chosen. */
  choices: [string, string][];
  /** Who is asked, without the choice. */
  path: string;
  /** What is in the answer. */
  ways: (answer: unknown) => W[];
  /** What is said of a way, and what it is called. */
  about?: (way: W) => { label: string; lead: ComponentChildren };
}) {
  const { session } = useWorld();
  const [of, setOf] = useState(choices[0]?.[0] ?? "");
  const [failure, setFailure] = useState<Failure | null>(null);
  const [found, setFound] = useState<W[] | null>(null);
  const [open, setOpen] = useState(false);
  if (!session.attach) return null;
  const load = async (choice: string) => {
    setOf(choice);
    setFailure(null);
    try {
      setFound(ways(await call<unknown>(`${path}?for=${choice}`)));
    } catch (e) {
      setFound(null);
      if (e instanceof Failure) setFailure(e);
    }
  };
  return (
    <Card title={title}>
      <details
        open={open}
        onToggle={(e) => {
          setOpen(e.currentTarget.open);
          if (e.currentTarget.open && !found) void load(of);
        }}
      >
        <summary>What to type</summary>
        <label>
          {word}{" "}
          <select value={of} onChange={(e) => void load(e.currentTarget.value)}>
            {choices.map(([choice, name]) => (
              <option key={choice} value={choice}>
                {name}
              </option>
            ))}
          </select>
        </label>
        {failure && <Said failure={failure} />}
        {found?.map((way, i) => {
          const said = about?.(way);
          return (
            <div key={i} class="way">
              <p>
                {said?.lead} <Copy text={way.text} />
              </p>
              <pre tabIndex={0} role="region" aria-label={said?.label ?? "What to type"}>
                {way.text}
              </pre>
              <ul>
                {way.notes.map((note) => (
                  <li key={note}>{sentence(note)}</li>
                ))}
              </ul>
            </div>
          );
        })}
      </details>
    </Card>
  );
}
