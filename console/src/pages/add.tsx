// Adding a disk: what is to be cached, how, and then what to type for a virtual machine.
import { useState } from "preact/hooks";
import { Failure, post, type Disk } from "../api";
import { bytes } from "../format";
import { useLive } from "../live";
import { Card, Field, Notice, Said, Shown } from "../parts/ui";
import { useOperator, useWorld } from "../state";
import { Attach } from "./disk";
import { diskPage } from "./disks";

interface Entry {
  name: string;
  path: string;
  kind: "directory" | "file" | "device";
  size: number;
}

interface Listing {
  path: string;
  parent: string | null;
  entries: Entry[];
  more: boolean;
}

/** The form of an image, as its name tells; the daemon looks into it and says if that is wrong. */
function form(path: string): string {
  const found = /\.(qcow2|vmdk|vdi|vhdx)$/i.exec(path);
  return found ? `${found[1]!.toLowerCase()}:${path}` : path;
}

function proposed(path: string): string {
  const last = path.split("/").pop() ?? "";
  return last.replace(/\.[a-z0-9]+$/i, "").replace(/[^A-Za-z0-9._-]/g, "-").slice(0, 64);
}

export function Add() {
  const operator = useOperator();
  const { session, disks } = useWorld();
  const [origin, setOrigin] = useState("");
  const [name, setName] = useState("");
  const [mode, setMode] = useState("write-back");
  const [readOnly, setReadOnly] = useState(false);
  const [soleUser, setSoleUser] = useState(false);
  const [failure, setFailure] = useState<Failure | null>(null);
  const [busy, setBusy] = useState(false);
  const [added, setAdded] = useState<Disk | null>(null);
  if (!operator) {
    return (
      <>
        <h1>Add a disk</h1>
        <Notice kind="warn">
          <strong>You may not do this.</strong> Log in as an operator.
        </Notice>
      </>
    );
  }
  if (added) {
    return (
      <>
        <h1>Add a disk</h1>
        <Notice kind="good">
          <a href={diskPage(added.name)}>{added.name}</a> is {added.state}: {bytes(added.size)} on <code>{added.origin}</code>.
        </Notice>
        {(added.notices ?? []).map((text) => (
          <Notice kind="info" key={text}>
            {text}
          </Notice>
        ))}
        <Attach name={added.name} />
        <p>
          <button
            type="button"
            onClick={() => {
              setAdded(null);
              setOrigin("");
              setName("");
            }}
          >
            Add another
          </button>
        </p>
      </>
    );
  }
  const pick = (path: string) => {
    setOrigin(form(path));
    setFailure(null);
    if (!name || name === proposed(origin)) setName(proposed(path));
  };
  const add = async () => {
    setBusy(true);
    setFailure(null);
    try {
      setAdded(await post<Disk>("/v1/disks", { name, origin, mode, read_only: readOnly, sole_user: soleUser }));
      disks.again();
    } catch (e) {
      setFailure(e instanceof Failure ? e : new Failure("refused", String(e)));
    }
    setBusy(false);
  };
  return (
    <>
      <h1>Add a disk</h1>
      <p>Nothing is written to the origin but what the guest writes; without Hearth it is the disk, once it was flushed.</p>
      <div class="columns">
        <Card title="Origin">
          {session.browse ? (
            <Browse pick={pick} />
          ) : (
            <p>
              The console may reach no files yet. On the host, <code>hearth console enable --allow-path DIRECTORY</code>{" "}
              lists what it may.
            </p>
          )}
          {session.servers.length > 0 && <p class="dim">Servers you may use: {session.servers.join(", ")}.</p>}
        </Card>
        <Card title="Disk">
          <form
            onSubmit={(e) => {
              e.preventDefault();
              void add();
            }}
          >
            <Field label="File, device or address" hint="A path, qcow2:PATH and its like, or nbd://HOST/EXPORT">
              <input required value={origin} onInput={(e) => setOrigin(e.currentTarget.value)} />
            </Field>
            <Field label="Name" hint="Letters, digits, -, _ and .">
              <input required maxLength={64} pattern="[A-Za-z0-9._\-]+" value={name} onInput={(e) => setName(e.currentTarget.value)} />
            </Field>
            <Field label="Cache mode">
              <select value={mode} onChange={(e) => setMode(e.currentTarget.value)}>
                <option value="write-back">write-back: writes complete on flash</option>
                <option value="write-back-ordered">write-back-ordered: and the origin keeps the guest's order</option>
                <option value="write-through">write-through: writes complete on the origin</option>
                <option value="write-around">write-around: only reads are cached</option>
                <option value="off">off: nothing is cached</option>
              </select>
            </Field>
            <label class="check">
              <input type="checkbox" checked={readOnly} onChange={(e) => setReadOnly(e.currentTarget.checked)} /> Refuse writes
            </label>
            {origin.startsWith("nbd://") && (
              <label class="check">
                <input type="checkbox" checked={soleUser} onChange={(e) => setSoleUser(e.currentTarget.checked)} /> Nobody else
                writes this export
              </label>
            )}
            <p>
              <button class="main" disabled={busy} aria-busy={busy}>
                Add
              </button>
            </p>
          </form>
          {failure && <Said failure={failure} />}
        </Card>
      </div>
    </>
  );
}

function Browse({ pick }: { pick: (path: string) => void }) {
  const [at, setAt] = useState("");
  const live = useLive<Listing>(`/console/browse${at ? `?path=${encodeURIComponent(at)}` : ""}`, 15000);
  return (
    <>
      <p class="path">
        {at ? (
          <>
            <button type="button" onClick={() => setAt(live.data?.parent ?? "")}>
              Up
            </button>{" "}
            <code>{at}</code>
          </>
        ) : (
          "What the console may reach:"
        )}
      </p>
      <Shown live={live} empty={(l) => l.entries.length === 0 && <p>There is nothing in it.</p>}>
        {(listing) => (
          <ul class="files" aria-label="Files">
            {listing.entries.map((entry) => (
              <li key={entry.path}>
                <button type="button" onClick={() => (entry.kind === "directory" ? setAt(entry.path) : pick(entry.path))}>
                  <span aria-hidden="true">{entry.kind === "directory" ? "▸ " : ""}</span>
                  {entry.name}
                  {entry.kind === "directory" && "/"}
                </button>
                <span class="dim">{entry.kind === "file" ? bytes(entry.size) : entry.kind}</span>
              </li>
            ))}
            {listing.more && <li>There is more than is shown; type its path.</li>}
          </ul>
        )}
      </Shown>
    </>
  );
}
