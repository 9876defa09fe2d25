// The server beside this page: who we are to it, and the daemon's API behind it.
//
// A session is two secrets. The cookie is the browser's; the other is kept here and sent in a header, which a page
// of another site cannot do.
import type { components } from "./openapi";

export type Schemas = components["schemas"];
export type Pool = Schemas["PoolInfo"];
export type Disk = Schemas["DiskInfo"];
export type Stats = Schemas["StatsReport"];
export type DiskStats = Schemas["DiskReport"];
export type Counters = Schemas["Counters"];
export type Latency = Schemas["LatencyReport"];
export type AdviceReport = Schemas["AdviceReport"];
export type Advice = Schemas["Advice"];
export type HistogramReport = Schemas["HistogramReport"];
export type EventInfo = Schemas["EventInfo"];
export type Datastore = Schemas["DatastoreInfo"];

export interface Session {
  name: string;
  role: "viewer" | "operator";
  link: boolean;
  browse: boolean;
  servers: string[];
  /** The name of the host that is shown. */
  host: string;
  attach: boolean;
  version: string;
}

/** Why an answer is none. */
export type Trouble = "gone" | "denied" | "missing" | "refused" | "conflict" | "out";

export class Failure extends Error {
  constructor(
    readonly trouble: Trouble,
    message: string,
    readonly remedy = "",
  ) {
    super(message);
  }
}

const KEPT = "hearth-token";
let whenOut: () => void = () => {};

/** Who is told when the session has ended. */
export function onOut(tell: () => void) {
  whenOut = tell;
}

function kind(status: number): Trouble {
  if (status === 401) return "out";
  if (status === 403) return "denied";
  if (status === 404) return "missing";
  if (status === 409) return "conflict";
  if (status >= 502 && status <= 504) return "gone";
  return "refused";
}

interface Asked {
  method?: "GET" | "POST" | "PATCH";
  body?: unknown;
  /** Nobody's hand asks: it does not keep the session open. */
  passive?: boolean;
}

export async function call<T>(path: string, { method = "GET", body, passive = false }: Asked = {}): Promise<T> {
  const headers: Record<string, string> = { "hearth-token": localStorage.getItem(KEPT) ?? "" };
  if (body !== undefined) headers["content-type"] = "application/json";
  if (passive) headers["hearth-passive"] = "1";
  let response: Response;
  try {
    response = await fetch(path, {
      method,
      headers,
      body: body === undefined ? undefined : JSON.stringify(body),
      credentials: "same-origin",
      cache: "no-store",
    });
  } catch {
    throw new Failure("gone", "The console does not answer", "see whether its service runs, and the network to it");
  }
  let answer: unknown;
  try {
    answer = await response.json();
  } catch {
    if (response.ok) throw new Failure("gone", "The answer was cut short", "it is asked for again");
    answer = {};
  }
  if (response.ok) return answer as T;
  const said = answer as { error?: string; remedy?: string };
  const trouble = kind(response.status);
  if (trouble === "out" && path !== "/console/login") whenOut();
  throw new Failure(trouble, said.error ?? `HTTP status ${response.status}`, said.remedy ?? "");
}

export const post = <T = unknown>(path: string, body?: unknown) => call<T>(path, { method: "POST", body });
export const patch = <T = unknown>(path: string, body: unknown) => call<T>(path, { method: "PATCH", body });

/** The path of a disk in the API. */
export const diskPath = (name: string, rest = "") => `/v1/disks/${encodeURIComponent(name)}${rest}`;

export async function logIn(how: { link: string } | { name: string; password: string }): Promise<Session> {
  const given = await post<Session & { token: string }>("/console/login", how);
  localStorage.setItem(KEPT, given.token);
  return given;
}

export async function whoAmI(): Promise<Session | null> {
  if (!localStorage.getItem(KEPT)) return null;
  try {
    return await call<Session>("/console/session", { passive: true });
  } catch (e) {
    if (e instanceof Failure && e.trouble === "out") return null;
    throw e;
  }
}

export async function logOut() {
  try {
    await post("/console/logout");
  } finally {
    localStorage.removeItem(KEPT);
  }
}
