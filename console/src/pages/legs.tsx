// A disk whose origin has several legs: how each is, what is copied to those that lack something, and what a scrub has
// found. And how a disk that has one origin gets a second.
import { useEffect, useRef, useState } from "preact/hooks";
import { diskPath, Failure, post, type Disk, type Schemas } from "../api";
import { bytes, byteRate, clock, count, parseSize, seconds, typedSize } from "../format";
import { Act, Ask, Card, Field, Notice, Said, sentence } from "../parts/ui";
import { useOperator } from "../state";

type Leg = Schemas["MirrorLeg"];
type Scrub = Schemas["ScrubInfo"];
type Undecided = Schemas["Undecided"];

/** So far back is looked for how fast something is. */
const WINDOW = 30;

/** Units of `done` a second, since it was first seen to grow; `null` while that is not known. */
function usePace(done: number): number | null {
  const seen = useRef<[number, number][]>([]);
  const now = Date.now() / 1000;
  const all = seen.current;
  const last = all[all.length - 1];
  // What begins anew has no pace yet.
  if (last && done < last[1]) all.length = 0;
  if (!last || now - last[0] > 1 || done !== last[1]) all.push([now, done]);
  while (all.length > 2 && now - all[0]![0] > WINDOW) all.shift();
  const [since, before] = all[0]!;
  return now - since >= 1 && done > before ? (done - before) / (now - since) : null;
}

/** How far something is that goes on, and when it is over at the pace it has. */
function Going({ label, done, of, pace }: { label: string; done: number; of: number; pace: number | null }) {
  const left = Math.max(0, of - done);
  const text = `${bytes(left)} left${pace ? ` at ${byteRate(pace)}, ${seconds(left / pace)}` : ""}`;
  return (
    <span class="progress">
      <progress max={Math.max(1, of)} value={Math.min(done, of)} aria-label={`${label}: ${text}`} /> {text}
    </span>
  );
}

const legMood = (state: string) => (state === "current" ? "good" : state === "out" ? "bad" : "info");

export function Legs({ disk, again }: { disk: Disk; again: () => void }) {
  const operator = useOperator();
  const legs = disk.legs ?? [];
  if (legs.length === 0) return null;
  return (
    <div class="columns">
      <Card title="Legs" aside={<Copying disk={disk} again={again} />}>
        <p class="dim">Each of them, alone, is the disk. Reads go to any that is current; writes to all that are not out.</p>
        <ul class="legs">
          {legs.map((leg) => (
            <One key={leg.origin} leg={leg} disk={disk} again={again} />
          ))}
        </ul>
        {operator && <Add disk={disk} again={again} />}
      </Card>
      <Scrubs disk={disk} again={again} />
    </div>
  );
}

function One({ leg, disk, again }: { leg: Leg; disk: Disk; again: () => void }) {
  const operator = useOperator();
  const [asking, ask] = useState<"replace" | "remove" | null>(null);
  const measured = usePace(leg.copied);
  // Pieces are counted when they are whole, so that a slow copy has no pace of its own at first, but the one it may have.
  const pace = disk.upkeep?.paused ? null : (measured ?? (disk.upkeep?.rate || null));
  const copying = leg.state === "resyncing" || leg.state === "checking";
  const others = (disk.legs ?? []).some((other) => other.origin !== leg.origin && other.state === "current");
  const close = () => ask(null);
  return (
    <li aria-label={`Leg ${leg.origin}`}>
      <span>
        <span class={`state ${legMood(leg.state)}`}>{leg.state}</span> <code>{leg.origin}</code>{" "}
        {copying && disk.upkeep?.paused && <span class="state warn">paused</span>}
      </span>
      {copying && leg.behind > 0 && <Going label={leg.origin} done={disk.size - leg.behind} of={disk.size} pace={pace} />}
      {(leg.reason || leg.remedy) && (
        <p>
          <strong>{sentence(leg.reason ?? "")}</strong> {sentence(leg.remedy ?? "")}
        </p>
      )}
      {operator && (
        <span class="acts">
          <button type="button" aria-label={`Replace ${leg.origin}`} onClick={() => ask("replace")}>
            Replace…
          </button>
          <button type="button" class="danger" aria-label={`Take out ${leg.origin}`} disabled={!others} onClick={() => ask("remove")}>
            Take out…
          </button>
        </span>
      )}
      <Ask open={asking === "remove"} title={`Take ${leg.origin} out?`} close={close}>
        <p>
          It is the disk as it is now, less what still waits on flash ({bytes(disk.dirty)} dirty), and is not written any
          more. {(disk.legs ?? []).length === 2 && "What is left is one leg: if that dies, the disk is gone."}
        </p>
        <Act
          class="danger"
          act={() => post(diskPath(disk.name, "/mirror"), { remove: leg.origin })}
          done={() => {
            close();
            again();
          }}
        >
          Take it out
        </Act>{" "}
        <button type="button" onClick={close}>
          Keep it
        </button>
      </Ask>
      <Ask open={asking === "replace"} title={`Replace ${leg.origin}`} close={close}>
        <Replace leg={leg} disk={disk} close={close} again={again} />
      </Ask>
    </li>
  );
}

/** Which legs are to go when another is current, by disk. Seen to while the disk is shown, and remembered meanwhile. */
const going = new Map<string, { old: string; next: string; seen: boolean }>();

function Replace({ leg, disk, close, again }: { leg: Leg; disk: Disk; close: () => void; again: () => void }) {
  const [next, setNext] = useState("");
  const path = diskPath(disk.name, "/mirror");
  return (
    <>
      <p>
        The new leg gets all of the disk while that is used; <strong>everything on it is overwritten</strong>. It has to be
        blank at its ends, and at least as large.{" "}
        {leg.state === "out"
          ? "The old one is out already, and is forgotten when the new one is there."
          : "The old one stays until the new one is current."}
      </p>
      <Field label="New leg" hint="A file, a device or an address the console may reach">
        <input value={next} onInput={(e) => setNext(e.currentTarget.value)} />
      </Field>
      <Act
        class="main"
        disabled={!next.trim()}
        act={async () => {
          const add = next.trim();
          if (leg.state === "out") {
            const remove = () => post(path, { remove: leg.origin });
            // Another disk in the old one's place has its name, which has to be free.
            if (add === leg.origin) await remove();
            await post(path, { add });
            if (add !== leg.origin) await remove();
            return;
          }
          const all = (await post<Disk>(path, { add })).legs ?? [];
          const before = new Set((disk.legs ?? []).map((l) => l.origin));
          const came = all.find((l) => !before.has(l.origin));
          if (came) going.set(disk.name, { old: leg.origin, next: came.origin, seen: false });
        }}
        done={() => {
          close();
          again();
        }}
      >
        Replace it
      </Act>{" "}
      <button type="button" onClick={close}>
        Leave it
      </button>
    </>
  );
}

/** Takes the old leg out when the new one holds the disk, and says what it waits for. */
function Replacing({ disk, again }: { disk: Disk; again: () => void }) {
  const [failure, setFailure] = useState<Failure | null>(null);
  const busy = useRef(false);
  const wanted = going.get(disk.name);
  const state = (disk.legs ?? []).find((l) => l.origin === wanted?.next)?.state;
  useEffect(() => {
    if (!wanted || busy.current) return;
    // An answer from before the new leg was added does not list it yet.
    if (state === undefined && !wanted.seen) return;
    wanted.seen = true;
    if (state === undefined || !(disk.legs ?? []).some((l) => l.origin === wanted.old)) {
      going.delete(disk.name);
      return;
    }
    if (state !== "current") return;
    busy.current = true;
    going.delete(disk.name);
    post(diskPath(disk.name, "/mirror"), { remove: wanted.old })
      .catch((e) => setFailure(e instanceof Failure ? e : new Failure("refused", String(e))))
      .finally(() => {
        busy.current = false;
        again();
      });
  });
  if (failure) return <Said failure={failure} />;
  if (!wanted) return null;
  return (
    <Notice kind="info">
      <code>{wanted.next}</code> takes the place of <code>{wanted.old}</code>, which is taken out when the other is current.
      Close this page before that, and both stay legs until somebody takes the old one out.
    </Notice>
  );
}

function Copying({ disk, again }: { disk: Disk; again: () => void }) {
  const operator = useOperator();
  const upkeep = disk.upkeep;
  if (!operator || !upkeep) return null;
  const path = diskPath(disk.name, "/mirror");
  return (
    <span class="acts">
      <Act act={() => post(path, { paused: !upkeep.paused })} done={again}>
        {upkeep.paused ? "Resume copying" : "Pause copying"}
      </Act>
    </span>
  );
}

function Add({ disk, again }: { disk: Disk; again: () => void }) {
  const [add, setAdd] = useState("");
  const [rate, setRate] = useState<string | null>(null);
  const upkeep = disk.upkeep;
  const path = diskPath(disk.name, "/mirror");
  const known = typedSize(upkeep?.rate ?? 0);
  return (
    <>
      <Replacing disk={disk} again={again} />
      <details>
        <summary>Another leg, and how fast is copied</summary>
        <Field label="A leg more" hint="All of it is overwritten. It has to be blank at its ends, and at least as large.">
          <input value={add} onInput={(e) => setAdd(e.currentTarget.value)} />
        </Field>
        <Act disabled={!add.trim()} act={() => post(path, { add: add.trim() })} done={() => { setAdd(""); again(); }}>
          Add the leg
        </Act>
        <Field label="Bytes a second that are copied at most" hint="0: no limit">
          <input value={rate ?? known} onInput={(e) => setRate(e.currentTarget.value)} />
        </Field>
        <Act
          disabled={rate === null}
          act={() => post(path, { rate: typed(rate ?? "") })}
          done={() => {
            setRate(null);
            again();
          }}
        >
          Set it
        </Act>
      </details>
    </>
  );
}

function typed(text: string): number {
  const size = parseSize(text);
  if (size === null) throw new Failure("refused", `“${text}” is no size; type 512K, 50M or 1.5G`);
  return size;
}

/** What has one origin can have two. */
export function Second({ disk, again }: { disk: Disk; again: () => void }) {
  const operator = useOperator();
  const [add, setAdd] = useState("");
  // What lives on flash has no origin that could be a leg.
  const single = (disk.legs ?? []).length === 0 && (disk.home === undefined || disk.home === "origin");
  if (!operator || !single || disk.read_only) return null;
  return (
    <Card title="Make it a mirror">
      <details>
        <summary>Add a second leg</summary>
        <p>
          Its origin is the first leg and stays as it is; the second gets all of it while the disk is used. Then either may
          die. <strong>Everything on the second is overwritten.</strong> It has to be blank at its ends, and at least as large.
        </p>
        <Field label="Second leg" hint="A file, a device or an address the console may reach">
          <input value={add} onInput={(e) => setAdd(e.currentTarget.value)} />
        </Field>
        <Act disabled={!add.trim()} act={() => post(diskPath(disk.name, "/mirror"), { add: add.trim() })} done={again}>
          Make it a mirror
        </Act>
      </details>
    </Card>
  );
}

/** What a scrub has found, in a sentence. */
function found(scrub: Scrub, size: number): string {
  const told = [
    scrub.active
      ? `${bytes(Math.min(scrub.at, size))} of ${bytes(size)} compared`
      : scrub.called_off
        ? `called off at ${bytes(Math.min(scrub.at, size))} of ${bytes(size)}`
        : `${bytes(scrub.checked)} compared`,
  ];
  if (scrub.partial > 0) told.push(`${bytes(scrub.partial)} of that not on all legs`);
  if (scrub.repairs > 0) told.push(`${count(scrub.repairs)} places repaired (${bytes(scrub.repaired)})`);
  else if (scrub.undecided_all === 0 && scrub.unread === 0) told.push("all the same");
  if (scrub.undecided_all > 0) told.push(`${count(scrub.undecided_all)} places undecided`);
  if (scrub.unread > 0) told.push(`${bytes(scrub.unread)} that no leg can read`);
  return told.join(", ");
}

function Scrubs({ disk, again }: { disk: Disk; again: () => void }) {
  const operator = useOperator();
  const upkeep = disk.upkeep;
  const scrub = upkeep?.scrub ?? null;
  const pace = usePace(scrub?.active ? scrub.at : 0);
  const [every, setEvery] = useState<string | null>(null);
  const [rate, setRate] = useState<string | null>(null);
  if (!upkeep) return null;
  const path = diskPath(disk.name, "/scrub");
  const act = (body: Partial<Schemas["ScrubSet"]>) => () => post(path, body);
  return (
    <Card
      title="Scrub"
      aside={
        operator && (
          <span class="acts">
            {scrub?.active ? (
              <Act act={act({ cancel: true })} done={again}>
                Call it off
              </Act>
            ) : (
              <>
                <Act act={act({ begin: true })} done={again}>
                  {scrub?.called_off ? "Go on" : "Scrub now"}
                </Act>
                {scrub?.called_off && (
                  <Act act={act({ begin: true, anew: true })} done={again}>
                    From the start
                  </Act>
                )}
              </>
            )}
          </span>
        )
      }
    >
      <p data-test="scrub">
        {scrub ? sentence(found(scrub, disk.size)) : "The legs were never compared."}{" "}
        {scrub?.ended != null && !scrub.active && <span class="dim">Ended {clock(scrub.ended)}. </span>}
        <span class="dim">
          {upkeep.scrub_every_days === 0 ? "Only when asked for." : `Every ${upkeep.scrub_every_days} days.`}
        </span>
      </p>
      {scrub?.active && (
        <p>
          <Going label="Scrub" done={scrub.at} of={disk.size} pace={pace} />
        </p>
      )}
      {scrub && scrub.undecided.length > 0 && <Open scrub={scrub} disk={disk} again={again} />}
      {operator && (
        <details>
          <summary>How often, and how fast</summary>
          <Field label="Days from one to the next" hint="0: only when asked for">
            <input inputMode="numeric" value={every ?? String(upkeep.scrub_every_days)} onInput={(e) => setEvery(e.currentTarget.value)} />
          </Field>
          <Field label="Bytes a second that are compared at most" hint="0: no limit">
            <input value={rate ?? typedSize(upkeep.scrub_rate)} onInput={(e) => setRate(e.currentTarget.value)} />
          </Field>
          <Act
            disabled={every === null && rate === null}
            act={() => {
              const days = every === null ? undefined : Number(every);
              if (days !== undefined && (every!.trim() === "" || !Number.isInteger(days) || days < 0)) {
                throw new Failure("refused", `“${every}” is no number of days`);
              }
              return post(path, { every_days: days, rate: rate === null ? undefined : typed(rate) });
            }}
            done={() => {
              setEvery(null);
              setRate(null);
              again();
            }}
          >
            Set
          </Act>
        </details>
      )}
    </Card>
  );
}

/** What nobody but somebody can decide. */
function Open({ scrub, disk, again }: { scrub: Scrub; disk: Disk; again: () => void }) {
  const operator = useOperator();
  const [prefer, setPrefer] = useState<string | null>(null);
  const open = scrub.undecided.some((place) => !place.cached);
  return (
    <>
      {open && (
        <Notice kind="bad">
          <strong>The legs differ, and nothing tells which one is right.</strong> Look at what they hold there, and say which
          leg it is: the others are made as that one.
        </Notice>
      )}
      <div class="scroll" tabIndex={0} role="region" aria-label="Places that are undecided">
        <table>
          <thead>
            <tr>
              <th scope="col">What</th>
              <th scope="col" class="number">
                First byte
              </th>
              <th scope="col" class="number">
                Bytes
              </th>
              <th scope="col">Checksums of the first block</th>
            </tr>
          </thead>
          <tbody>
            {scrub.undecided.slice(0, 50).map((place: Undecided) => (
              <tr key={place.offset}>
                <td>{place.cached ? "the cache has something else than the legs" : "the legs differ"}</td>
                <td class="number">{count(place.offset)}</td>
                <td class="number">{count(place.length)}</td>
                <td>
                  {place.legs.map((leg) => (
                    <div key={leg.leg}>
                      <code>
                        {leg.sum.toString(16).padStart(8, "0")} {leg.leg}
                      </code>
                    </div>
                  ))}
                </td>
              </tr>
            ))}
          </tbody>
        </table>
      </div>
      {operator && open && (
        <p class="acts">
          {(disk.legs ?? [])
            .filter((leg) => leg.state === "current")
            .map((leg) => (
              <button key={leg.origin} type="button" onClick={() => setPrefer(leg.origin)}>
                <code>{leg.origin}</code> is right…
              </button>
            ))}
        </p>
      )}
      <Ask open={prefer !== null} title={`Is ${prefer ?? ""} right?`} close={() => setPrefer(null)}>
        <p>
          At {count(scrub.undecided_all)} {scrub.undecided_all === 1 ? "place" : "places"} the other legs are overwritten with
          what this one holds. That cannot be undone.
        </p>
        <Act
          class="danger"
          act={() => post(diskPath(disk.name, "/scrub"), { prefer })}
          done={() => {
            setPrefer(null);
            again();
          }}
        >
          It is right
        </Act>{" "}
        <button type="button" onClick={() => setPrefer(null)}>
          Not sure
        </button>
      </Ask>
    </>
  );
}
