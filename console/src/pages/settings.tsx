// What of a disk can be changed while it is in use.
import { useState } from "preact/hooks";
import { diskPath, Failure, patch, type Disk } from "../api";
import { bytes, parseSize, typedSize } from "../format";
import { Act, Card, Field, Notice, Said } from "../parts/ui";
import { useOperator } from "../state";

export const MODES = ["write-back", "write-back-ordered", "write-through", "write-around", "off"] as const;
const BLOCKS = [4, 8, 16, 32, 64, 128, 256, 512, 1024].map((k) => k * 1024);

interface Typed {
  mode: string;
  block_size: string;
  min: string;
  max: string;
  seq_cutoff: string;
  auto: boolean;
  origin_timeout: string;
  clients: string;
  max_age: string;
  size: string;
}

const SIZES = ["min", "max", "seq_cutoff", "size"] as const;

const asTyped = (disk: Disk): Typed => ({
  mode: disk.mode,
  block_size: String(disk.block_size),
  min: typedSize(disk.min),
  max: typedSize(disk.max),
  seq_cutoff: typedSize(disk.seq_cutoff),
  auto: disk.auto,
  origin_timeout: String(disk.origin_timeout),
  clients: String(disk.client_limit),
  max_age: String(disk.max_age ?? 0),
  size: typedSize(disk.size),
});

/** Fields that were touched, and the version of the settings they are based on. */
interface Touched {
  fields: Partial<Typed>;
  version: string;
}

/** The touched fields as the API takes them, or why one is invalid. */
function changed(fields: Partial<Typed>): { body: Record<string, unknown> } | { wrong: string } {
  const body: Record<string, unknown> = {};
  if (fields.mode !== undefined) body.mode = fields.mode;
  if (fields.block_size !== undefined) body.block_size = Number(fields.block_size);
  for (const name of SIZES) {
    const typed = fields[name];
    if (typed === undefined) continue;
    const size = parseSize(typed);
    if (size === null) return { wrong: `“${typed}” is no size; type 4K, 512M or 1.5G` };
    body[name] = size;
  }
  if (fields.auto !== undefined) body.auto = fields.auto;
  for (const name of ["origin_timeout", "clients", "max_age"] as const) {
    const typed = fields[name];
    if (typed === undefined) continue;
    const value = Number(typed);
    if (typed.trim() === "" || !Number.isFinite(value)) return { wrong: `“${typed}” is no number` };
    body[name] = value;
  }
  return { body };
}

export function Settings({ disk, again }: { disk: Disk; again: () => Promise<void> }) {
  const operator = useOperator();
  const [touched, setTouched] = useState<Touched | null>(null);
  const [said, say] = useState<Failure | string | null>(null);
  const [busy, setBusy] = useState(false);
  const is = { ...asTyped(disk), ...touched?.fields };
  const onOrigin = disk.home === undefined || disk.home === "origin";
  const put = (more: Partial<Typed>) => {
    setTouched({ fields: { ...touched?.fields, ...more }, version: touched?.version ?? disk.version });
    say(null);
  };
  const save = async () => {
    if (!touched) return;
    // Hidden in other modes, where it means nothing.
    const { max_age, ...others } = touched.fields;
    const all = changed(is.mode === "write-back-ordered" ? touched.fields : others);
    if ("wrong" in all) return say(new Failure("refused", all.wrong));
    setBusy(true);
    try {
      await patch(diskPath(disk.name), { ...all.body, version: touched.version });
      setTouched(null);
      say("Saved.");
    } catch (e) {
      // The next attempt is based on the settings that are shown when the form opens again.
      if (e instanceof Failure && e.trouble === "conflict") setTouched(null);
      say(e instanceof Failure ? e : new Failure("refused", String(e)));
    }
    await again();
    setBusy(false);
  };
  return (
    <Card title="Settings">
      <form
        onSubmit={(e) => {
          e.preventDefault();
          void save();
        }}
      >
        <fieldset disabled={!operator || busy}>
          <legend class="hidden">Settings of {disk.name}</legend>
          <Field label="Cache mode">
            <select value={is.mode} onChange={(e) => put({ mode: e.currentTarget.value })}>
              {MODES.map((m) => (
                <option key={m}>{m}</option>
              ))}
            </select>
          </Field>
          <Field label="Cache block size">
            <select value={is.block_size} onChange={(e) => put({ block_size: e.currentTarget.value })}>
              {BLOCKS.map((b) => (
                <option key={b} value={String(b)}>
                  {bytes(b)}
                </option>
              ))}
            </select>
          </Field>
          <Field label="Flash kept for it" hint="0: none is kept">
            <input value={is.min} onInput={(e) => put({ min: e.currentTarget.value })} />
          </Field>
          <Field label="Most flash it may use" hint="0: no limit">
            <input value={is.max} onInput={(e) => put({ max: e.currentTarget.value })} />
          </Field>
          <label class="check">
            <input type="checkbox" checked={is.auto} onChange={(e) => put({ auto: e.currentTarget.checked })} /> What is kept
            follows the advice
          </label>
          <Field label="Sequential reads longer than this are not cached" hint="0: all are">
            <input value={is.seq_cutoff} onInput={(e) => put({ seq_cutoff: e.currentTarget.value })} />
          </Field>
          {is.mode === "write-back-ordered" && (
            <Field label="Seconds the origin may lack something that was flushed" hint="0: no limit; then writes wait">
              <input inputMode="decimal" value={is.max_age} onInput={(e) => put({ max_age: e.currentTarget.value })} />
            </Field>
          )}
          {!onOrigin && (
            <Field label="Size" hint="Of a disk that lives on flash; the guest has to be told by itself">
              <input value={is.size} onInput={(e) => put({ size: e.currentTarget.value })} />
            </Field>
          )}
          <Field label="Seconds to wait for the origin's server">
            <input inputMode="decimal" value={is.origin_timeout} onInput={(e) => put({ origin_timeout: e.currentTarget.value })} />
          </Field>
          <Field label="Clients at a time" hint="0: any number">
            <input inputMode="numeric" value={is.clients} onInput={(e) => put({ clients: e.currentTarget.value })} />
          </Field>
          {operator && (
            <p class="acts">
              <button class="main" disabled={touched === null} aria-busy={busy}>
                Save
              </button>
              {touched && (
                <button type="button" onClick={() => setTouched(null)}>
                  As it was
                </button>
              )}
            </p>
          )}
          {operator && onOrigin && (
            <p>
              Has the origin grown?{" "}
              <Act act={() => patch(diskPath(disk.name), { size_from_origin: true })} done={again}>
                Take over its size
              </Act>
            </p>
          )}
        </fieldset>
      </form>
      {said instanceof Failure && <Said failure={said} />}
      {typeof said === "string" && <Notice kind="good">{said}</Notice>}
      {!operator && <p class="dim">An operator can change them.</p>}
    </Card>
  );
}
