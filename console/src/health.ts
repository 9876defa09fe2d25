// What is wrong, as the API tells it in many places, in one list.
import type { Disk, Pool, Stats } from "./api";
import { bytes, seconds } from "./format";

export interface Reason {
  /** What is not known is no reason to worry. */
  severity: "bad" | "warn" | "info";
  what: string;
  remedy: string;
  disk?: string;
  /** What else it is about. */
  of?: string;
}

export function reasons(pool: Pool | null, disks: Disk[] | null, stats: Stats | null): Reason[] {
  const all: Reason[] = [];
  const add = (severity: "bad" | "warn", what: string, remedy?: string | null, disk?: string) =>
    all.push({ severity, what, remedy: remedy ?? "", disk });
  if (stats?.pool.flash_failed) add("bad", "The flash failed; disks go on from their origins", "see the events for what happened, and replace it");
  for (const notice of pool?.notices ?? []) add("warn", notice);
  for (const stuck of pool?.stuck ?? []) {
    add("bad", `Thread ${stuck.thread} of the daemon has been silent for ${seconds(stuck.seconds)}`, "look at the daemon's log");
  }
  for (const disk of disks ?? []) {
    if (["waiting", "refused", "fenced"].includes(disk.state)) {
      add("bad", disk.reason ?? `It is ${disk.state}`, disk.remedy, disk.name);
    } else if (disk.reason) add("warn", disk.reason, disk.remedy, disk.name);
    const stuck = disk.cannot_write_back;
    if (stuck) {
      add("bad", `Nothing could be written back for ${seconds(stuck.seconds)}: ${stuck.error}`, `${bytes(stuck.dirty)} are only on flash`, disk.name);
    }
    const lost = (disk.lost ?? []).reduce((sum, range) => sum + range.length, 0);
    if (lost > 0) add("bad", `${bytes(lost)} were lost with the flash`, "restore them in the guest, or accept the loss on the disk's page", disk.name);
    if (disk.link && !disk.link.connected) {
      add(disk.link.failing ? "bad" : "warn", disk.link.reason ?? "The origin's server is gone", disk.link.remedy, disk.name);
    }
    if (disk.incomplete) add("warn", disk.incomplete.error, disk.incomplete.remedy, disk.name);
    for (const leg of disk.legs ?? []) {
      if (leg.state !== "current") add("warn", `Leg ${leg.origin} is ${leg.state}${leg.reason ? `: ${leg.reason}` : ""}`, leg.remedy, disk.name);
    }
  }
  return all.sort((a, b) => Number(a.severity !== "bad") - Number(b.severity !== "bad"));
}
