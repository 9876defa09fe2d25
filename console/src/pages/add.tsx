// Adding a disk: what is to be cached, how, and then what to type for a virtual machine.
import { useState } from "preact/hooks";
import { Failure, post, type Disk, type Schemas } from "../api";
import { bytes } from "../format";
import { useLive } from "../live";
import { Card, Field, Notice, Said, sentence, Shown } from "../parts/ui";
import { useOperator, useWorld } from "../state";
import { Attach } from "./disk";
import { diskPage } from "./disks";

type Found = Schemas["OriginFound"];

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
  const found = /\.(qcow2|vmdk|vdi|vhdx|vhd)$/i.exec(path);
  return found ? `${found[1]!.toLowerCase()}:${path}` : path;
}

function proposed(path: string): string {
  const last = path.split("/").pop() ?? "";
  return last.replace(/\.[a-z0-9]+$/i, "").replace(/[^A-Za-z0-9._-]/g, "-").slice(0, 64);
}

export function Add() {
  const operator = useOperator();
  const { session } = useWorld();
  const [origin, setOrigin] = useState("");
  const [name, setName] = useState("");
  const [mode, setMode] = useState("write-back");
  const [readOnly, setReadOnly] = useState(false);
  const [soleUser, setSoleUser] = useState(false);
  const [failure, setFailure] = useState<Failure | null>(null);
  const [busy, setBusy] = useState(false);
  const [added, setAdded] = useState<Disk | null>(null);
  // What was found in the origin that is typed, and in no other.
  const [looked, setLooked] = useState<{ at: string; found: Found } | null>(null);
  const [takeover, setTakeover] = useState(false);
  const found = looked?.at === origin.trim() ? looked.found : null;
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
  const at = async (work: () => Promise<void>) => {
    setBusy(true);
    setFailure(null);
    try {
      await work();
    } catch (e) {
      setFailure(e instanceof Failure ? e : new Failure("refused", String(e)));
    }
    setBusy(false);
  };
  const look = (given: string) =>
    at(async () => {
      setTakeover(false);
      setLooked({ at: given, found: await post<Found>("/v1/origins/look", { origin: given }) });
    });
  const choose = (given: string) => {
    setOrigin(given);
    void look(given);
  };
  const pick = (path: string) => {
    if (!name || name === proposed(origin)) setName(proposed(path));
    choose(form(path));
  };
  const add = () =>
    at(async () => {
      const asked = { name, origin: origin.trim(), mode, read_only: readOnly, sole_user: soleUser, takeover };
      setAdded(await post<Disk>("/v1/disks", asked));
    });
  // The daemon says when another pool has it; only then there is something to choose.
  const owned = takeover || (failure?.remedy.includes("--takeover") ?? false);
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
              void (found ? add() : look(origin.trim()));
            }}
          >
            <Field label="File, device or address" hint="A path, qcow2:PATH and its like, or nbd://HOST/EXPORT">
              <input required value={origin} onInput={(e) => setOrigin(e.currentTarget.value)} />
            </Field>
            {found && <WhatIsThere found={found} choose={choose} />}
            <Field label="Name" hint="Letters, digits, -, _ and .">
              <input required={found !== null} maxLength={64} pattern="[A-Za-z0-9._\-]+" value={name} onInput={(e) => setName(e.currentTarget.value)} />
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
            {owned && (
              <label class="check">
                <input type="checkbox" checked={takeover} onChange={(e) => setTakeover(e.currentTarget.checked)} /> Take it from
                the pool that has it: what that one had not written back is missing then
              </label>
            )}
            <p>
              <button class="main" disabled={busy || found?.refused != null} aria-busy={busy}>
                {found ? "Add" : "Look at it"}
              </button>
            </p>
          </form>
          {failure && <Said failure={failure} />}
        </Card>
      </div>
    </>
  );
}

const KINDS: Record<string, string> = { file: "a file", device: "a block device", image: "an image" };

/** What Hearth found where the disk is to lie. */
function WhatIsThere({ found, choose }: { found: Found; choose: (origin: string) => void }) {
  const { instead, refused } = found;
  if (found.kind === "elsewhere") {
    return (
      <Notice kind="info">
        <strong>It lies on a server,</strong> which is asked when the disk is added.
      </Notice>
    );
  }
  const format = found.kind === "image" && found.format ? `, ${found.format}` : "";
  return (
    <div role="status" aria-label="What was found">
      <dl class="found">
        <dt>It is</dt>
        <dd>
          {KINDS[found.kind] ?? found.kind}
          {format}
        </dd>
        {found.size != null && (
          <>
            <dt>Size of the disk</dt>
            <dd>{bytes(found.size)}</dd>
          </>
        )}
        {found.stored != null && (
          <>
            <dt>Takes</dt>
            <dd>{bytes(found.stored)}</dd>
          </>
        )}
        {found.kind !== "image" && (
          <>
            <dt>In it</dt>
            <dd>{found.holds ?? "nothing that Hearth knows"}</dd>
          </>
        )}
      </dl>
      {found.disk && (
        <Notice kind="warn">
          The disk <a href={diskPage(found.disk)}>{found.disk}</a> has it already.
        </Notice>
      )}
      {refused && (
        <Notice kind="warn">
          <strong>{sentence(refused.error)}</strong> {sentence(refused.remedy)}{" "}
          {instead && (
            <button type="button" onClick={() => choose(instead)}>
              Take the disk in it
            </button>
          )}
        </Notice>
      )}
    </div>
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
