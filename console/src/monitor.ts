// What the second service answers about health and alerts. It has no OpenAPI document; these are its types.

export interface Reason {
  code: string;
  condition: Condition;
  what: string;
  remedy?: string;
}

export type Condition = "healthy" | "unknown" | "rebuilding" | "degraded" | "failed";

export interface Item {
  kind: string;
  name: string;
  about?: string;
  condition: Condition;
  reasons?: Reason[];
  disks?: string[];
}

export interface Report {
  at: number;
  condition: Condition;
  items: Item[];
  notes?: string[];
}

export interface Alert {
  kind: string;
  name: string;
  reason: Reason;
  since: number;
  ended?: number;
}

export interface Alerts {
  open: Alert[];
  past: Alert[];
  ways: { way: string; waiting: number; error?: string }[];
  waiting: { way: string; id: number; subject: string; attempts: number; next: number; error?: string }[];
  untold?: number;
}

export const mood = (condition: Condition) =>
  condition === "healthy" ? "good" : condition === "failed" ? "bad" : condition === "unknown" ? "info" : "warn";
