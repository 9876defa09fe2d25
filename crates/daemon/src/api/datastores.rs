//! Datastores over the control API: bodies and routes.

use std::fmt;
use std::str::FromStr;

use axum::Json;
use axum::extract::{Path, State};
use hearth_events::Event;
use hearth_fault::Fault;
use hearth_nfs::access::NOBODY;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::advice::AdviceReport;
use super::caller::Caller;
use super::server::{Body, Changed, Panel, Shared, change, run};
use super::stats::{Counters, LatencyReport, Ratios};
use super::types::{CacheMode, Done, ErrorBody, ScrubSet};
use crate::error::Result;
use crate::settings::SettingsChanged;

/// Who may use a datastore, and how; the options are those of exports(5).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct DatastoreClient {
    /// An address, or a network such as `192.0.2.0/24`.
    pub network: String,
    /// May change files.
    #[serde(default)]
    pub write: bool,
    /// Root of the client is root (`no_root_squash`); otherwise root counts as the anonymous user.
    #[serde(default)]
    pub root: bool,
    /// All users of the client count as the anonymous user.
    #[serde(default)]
    pub all_squash: bool,
    /// The anonymous user.
    #[serde(default = "nobody")]
    pub anonuid: u32,
    /// The group of the anonymous user.
    #[serde(default = "nobody")]
    pub anongid: u32,
    /// Calls from this host's own addresses may come from any source port; otherwise only from a privileged one, which no
    /// account without rights can use.
    #[serde(default)]
    pub insecure: bool,
}

fn nobody() -> u32 {
    NOBODY
}

fn set<T>(field: &mut T, value: T) -> Option<()> {
    *field = value;
    Some(())
}

impl DatastoreClient {
    /// A client that reads and writes, and whose root counts as nobody.
    pub fn new(network: &str) -> DatastoreClient {
        DatastoreClient {
            network: network.to_owned(),
            write: true,
            root: false,
            all_squash: false,
            anonuid: NOBODY,
            anongid: NOBODY,
            insecure: false,
        }
    }

    /// What it opens, in plain words.
    pub fn opened(&self) -> String {
        let what = if self.write { "read and write" } else { "read" };
        let anonymous = format!("user {}, group {}", self.anonuid, self.anongid);
        let identity = match (self.all_squash, self.root) {
            (true, _) => format!("every user counts as {anonymous}"),
            (false, true) => {
                "users count as the user and groups that they name, root included".to_owned()
            }
            (false, false) => {
                format!("users count as the user and groups that they name, root as {anonymous}")
            }
        };
        let ports = match self.insecure {
            true => "from any source port: every account of this host can use it so",
            false => "on this host, from privileged source ports only",
        };
        format!("{} may {what}; {identity}; {ports}", self.network)
    }
}

/// `NETWORK=rw`, `NETWORK=ro,no_root_squash` and the like, as [`FromStr`] reads it. What is not said is as it is by itself.
impl fmt::Display for DatastoreClient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let how = if self.write { "rw" } else { "ro" };
        write!(f, "{}={how}", self.network)?;
        for (is_set, word) in [
            (self.root, "no_root_squash"),
            (self.all_squash, "all_squash"),
            (self.insecure, "insecure"),
        ] {
            if is_set {
                write!(f, ",{word}")?;
            }
        }
        for (id, word) in [(self.anonuid, "anonuid"), (self.anongid, "anongid")] {
            if id != NOBODY {
                write!(f, ",{word}={id}")?;
            }
        }
        Ok(())
    }
}

/// `NETWORK[=OPTION[,OPTION]…]`.
impl FromStr for DatastoreClient {
    type Err = Fault;

    fn from_str(text: &str) -> std::result::Result<DatastoreClient, Fault> {
        let (network, how) = text.split_once('=').unwrap_or((text, ""));
        let mut client = DatastoreClient::new(network);
        for word in how.split(',').filter(|word| !word.is_empty()) {
            // All ones mean "as it is" where owners are changed.
            let id = |text: &str| text.parse().ok().filter(|id| *id != u32::MAX);
            let known = match word.split_once('=') {
                Some(("anonuid", text)) => id(text).and_then(|id| set(&mut client.anonuid, id)),
                Some(("anongid", text)) => id(text).and_then(|id| set(&mut client.anongid, id)),
                Some(_) => None,
                None => match word {
                    "rw" => set(&mut client.write, true),
                    "ro" => set(&mut client.write, false),
                    "root" | "no_root_squash" => set(&mut client.root, true),
                    "root_squash" => set(&mut client.root, false),
                    "all_squash" => set(&mut client.all_squash, true),
                    "no_all_squash" => set(&mut client.all_squash, false),
                    "insecure" => set(&mut client.insecure, true),
                    "secure" => set(&mut client.insecure, false),
                    _ => None,
                },
            };
            if known.is_none() {
                return Err(Fault::new(
                    format!("“{word}” is no option of a client"),
                    "write 192.0.2.7, 192.0.2.0/24=ro or 192.0.2.7=rw,no_root_squash; the options are rw, ro, root_squash, \
                     no_root_squash, all_squash, no_all_squash, anonuid=UID, anongid=GID, secure and insecure",
                ));
            }
        }
        Ok(client)
    }
}

/// Settings of files by what they are called.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct FileRule {
    /// What their names are like, `*.vmdk` say; with a `/`, what their paths in the datastore are like.
    #[serde(rename = "match")]
    pub pattern: String,
    /// They are to be all on flash: what is missing is read in, and none of it is evicted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pin: Option<bool>,
    /// They are to be on flash alone, and empty after a crash: those that are made, or have nothing in them yet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scratch: Option<bool>,
    /// What else holds for them: `mode`, `block_size`, `max` and `seq_cutoff`.
    #[serde(flatten)]
    pub settings: SettingsChanged,
}

/// How far a file is that is to be all on flash.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum PinState {
    /// It is being read in.
    Filling,
    /// All of it is on flash.
    Filled,
    /// So much flash cannot be kept for it.
    NoRoom,
    /// Of a disk: it cannot be read in just now.
    Waiting,
}

/// A file of a datastore that is a disk of the pool, or was one and is cached still.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct FileReport {
    /// Its path in the datastore.
    pub path: String,
    /// It is in use.
    pub open: bool,
    /// Bytes.
    pub size: u64,
    /// Cache mode.
    pub mode: CacheMode,
    /// Unit of filling in bytes.
    pub block_size: u64,
    /// Most bytes of flash it may use; 0 means no limit.
    pub max: u64,
    /// Bytes after which a sequential read stream is no longer cached; 0 caches all.
    pub seq_cutoff: u64,
    /// Bytes of it on flash.
    pub cached: u64,
    /// Bytes the directory does not have yet.
    pub dirty: u64,
    /// It is on flash alone.
    #[serde(default)]
    pub scratch: bool,
    /// Given if it is to be all on flash.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pin: Option<PinState>,
    /// What was counted since the daemon began to serve it.
    pub counters: Counters,
    /// What that means.
    pub ratios: Ratios,
    /// Reads served from flash.
    pub read_hit_latency: LatencyReport,
    /// Reads that needed the file.
    pub read_miss_latency: LatencyReport,
    /// Writes of blocks that were all cached.
    pub write_hit_latency: LatencyReport,
    /// Other writes.
    pub write_miss_latency: LatencyReport,
}

/// A datastore to be added.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct DatastoreAdd {
    /// What it is called; clients mount it as `/NAME`.
    pub name: String,
    /// The directory, an absolute path.
    pub directory: String,
    /// A second directory that is to hold the same, an absolute path: either of the two may be lost. It has to be empty.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mirror: Option<String>,
    /// Address, or address and port, to serve it on; `127.0.0.1:2049` if absent.
    #[serde(default)]
    pub listen: Option<String>,
    /// Who may come; this host, without being root, if absent.
    #[serde(default)]
    pub clients: Option<Vec<DatastoreClient>>,
    /// Nobody may change anything.
    #[serde(default)]
    pub read_only: bool,
}

/// What to change of a datastore.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct DatastoreSet {
    /// Serve it on another address; clients have to mount it anew.
    #[serde(default)]
    pub listen: Option<String>,
    /// Who may come, instead of those who might before.
    #[serde(default)]
    pub clients: Option<Vec<DatastoreClient>>,
    /// Nobody may change anything.
    #[serde(default)]
    pub read_only: Option<bool>,
    /// The directory has every write before it is answered; what was answered before is there after a flush.
    #[serde(default)]
    pub hold: Option<bool>,
    /// Settings of files by their names: put behind those there are, or into those of the same pattern.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rule: Option<FileRule>,
    /// The pattern whose settings hold no longer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unmatch: Option<String>,
}

/// One of the two directories of a mirrored datastore.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct TreeInfo {
    /// The directory.
    pub directory: String,
    /// `current`, `resyncing` or `out`.
    pub state: String,
    /// Why it is out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// Directories, files and parts of files (of 16 MiB) that it lacks; absent while that is not known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub missing: Option<u64>,
}

/// A place where the two directories of a datastore differ and nothing shows which one is right.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct TreeDifference {
    /// The file or directory, in the datastore.
    pub path: String,
    /// `names`: names in the directory, its owner or mode; `attributes`: a file's length, owner or mode; `content`: its
    /// data; `cached`: both hold the same data, and the cache something else.
    pub what: String,
    /// First byte of the data.
    pub offset: u64,
    /// Bytes of data.
    pub length: u64,
}

/// How a datastore in two directories is scrubbed, and the scrub under way or the last one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct TreeScrub {
    /// Bytes compared a second at most; 0: no limit.
    pub rate: u64,
    /// Days from one scrub to the next; 0: only on request.
    pub every_days: u32,
    /// A scrub is under way. It continues after a restart.
    pub active: bool,
    /// The last scrub was cancelled.
    pub called_off: bool,
    /// When it began, milliseconds since 1970; 0: there was none yet.
    pub began: u64,
    /// When it ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ended: Option<u64>,
    /// Bytes compared.
    pub checked: u64,
    /// Bytes not compared, because a directory failed there several times.
    pub unread: u64,
    /// Places repaired.
    pub repairs: u64,
    /// Bytes repaired.
    pub repaired: u64,
    /// Places where nothing shows which directory is right.
    pub undecided: u64,
    /// These places; of very many, the first.
    pub differences: Vec<TreeDifference>,
}

/// A datastore.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct DatastoreInfo {
    /// What it is called.
    pub name: String,
    /// The directory.
    pub directory: String,
    /// The two directories of a mirrored datastore, and how they are.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub trees: Vec<TreeInfo>,
    /// How two directories are scrubbed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scrub: Option<TreeScrub>,
    /// Clients can use it.
    pub served: bool,
    /// Why they cannot.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// What to do about it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub remedy: Option<String>,
    /// What somebody should know of it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub notices: Vec<String>,
    /// Two clients wrote a file of it in turn within the last hour: which.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub two_writers: Option<String>,
    /// Address and port it is served on.
    pub listen: String,
    /// A portmapper tells clients the port.
    pub portmapper: bool,
    /// Clients can lock files (NLM). Where they cannot, Linux needs `nolock` to mount it.
    #[serde(default)]
    pub locks: bool,
    /// The path under which clients mount it.
    pub path: String,
    /// Who may come.
    pub clients: Vec<DatastoreClient>,
    /// Who uses it: clients that called within the last hour, also before the daemon restarted, and have not unmounted since.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub used_by: Vec<DatastoreUser>,
    /// Nobody may change anything.
    pub read_only: bool,
    /// The directory has every write before it is answered.
    #[serde(default)]
    pub hold: bool,
    /// Settings of files by their names; of those that fit, the last that says something of a setting holds.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub rules: Vec<FileRule>,
    /// Files that are or were disks of the cache.
    pub disks: u64,
    /// Of these, those in use.
    pub open: u64,
    /// Bytes that the directory does not have yet.
    pub dirty: u64,
    /// These are being written to it.
    pub flushing: bool,
}

/// A client that uses a datastore.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DatastoreUser {
    /// Its address.
    pub address: String,
    /// When it called last, seconds since 1970.
    pub last: u64,
}

/// How a datastore is removed.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct DatastoreRemove {
    /// Also while clients use it: their files become stale.
    #[serde(default)]
    pub yes: bool,
}

/// All datastores, by name.
#[utoipa::path(get, path = "/v1/datastores", tag = "datastores", responses(
    (status = 200, body = Vec<DatastoreInfo>), (status = "default", body = ErrorBody)))]
async fn get_datastores(State(panel): Shared) -> Result<Json<Vec<DatastoreInfo>>> {
    run(panel, |c| c.datastores()).await
}

/// Serve a directory as a datastore.
#[utoipa::path(post, path = "/v1/datastores", tag = "datastores", request_body = DatastoreAdd, responses(
    (status = 200, body = DatastoreInfo), (status = "default", body = ErrorBody)))]
async fn add_datastore(
    State(panel): Shared,
    Caller(by): Caller,
    Body(add): Body<DatastoreAdd>,
) -> Result<Json<DatastoreInfo>> {
    let name = add.name.clone();
    change(panel, Changed::Datastore(&name), move |c| {
        let info = c.add_datastore(add)?;
        let datastore = info.name.clone();
        c.events().tell(Event::DatastoreAdded { datastore, by });
        Ok(info)
    })
    .await
}

/// One datastore.
#[utoipa::path(get, path = "/v1/datastores/{name}", tag = "datastores", params(("name" = String, Path)), responses(
    (status = 200, body = DatastoreInfo), (status = "default", body = ErrorBody)))]
async fn get_datastore(
    State(panel): Shared,
    Path(name): Path<String>,
) -> Result<Json<DatastoreInfo>> {
    run(panel, move |c| c.datastore(&name)).await
}

/// Change settings of a datastore. Clients that stay allowed notice nothing.
#[utoipa::path(patch, path = "/v1/datastores/{name}", tag = "datastores", params(("name" = String, Path)),
    request_body = DatastoreSet, responses(
    (status = 200, body = DatastoreInfo), (status = "default", body = ErrorBody)))]
async fn set_datastore(
    State(panel): Shared,
    Caller(by): Caller,
    Path(name): Path<String>,
    Body(set): Body<DatastoreSet>,
) -> Result<Json<DatastoreInfo>> {
    let store = name.clone();
    change(panel, Changed::Datastore(&store), move |c| {
        let info = c.set_datastore(&name, set)?;
        let datastore = name;
        c.events().tell(Event::DatastoreChanged { datastore, by });
        Ok(info)
    })
    .await
}

/// The files of a datastore that are disks of the pool, or were and are cached still; the busiest first.
#[utoipa::path(get, path = "/v1/datastores/{name}/files", tag = "datastores", params(("name" = String, Path)), responses(
    (status = 200, body = Vec<FileReport>), (status = "default", body = ErrorBody)))]
async fn get_datastore_files(
    State(panel): Shared,
    Path(name): Path<String>,
) -> Result<Json<Vec<FileReport>>> {
    run(panel, move |c| c.datastore_files(&name)).await
}

/// What more or less flash would do for the files of a datastore: those in use and a few that were used lately.
#[utoipa::path(get, path = "/v1/datastores/{name}/advice", tag = "datastores", params(("name" = String, Path)), responses(
    (status = 200, body = AdviceReport), (status = "default", body = ErrorBody)))]
async fn get_datastore_advice(
    State(panel): Shared,
    Path(name): Path<String>,
) -> Result<Json<AdviceReport>> {
    run(panel, move |c| c.datastore_advice(&name)).await
}

/// Begin to write everything to the directory that is only on flash. Poll the datastore until it is not flushing.
#[utoipa::path(post, path = "/v1/datastores/{name}/flush", tag = "datastores", params(("name" = String, Path)), responses(
    (status = 200, body = DatastoreInfo), (status = "default", body = ErrorBody)))]
async fn flush_datastore(
    State(panel): Shared,
    Path(name): Path<String>,
) -> Result<Json<DatastoreInfo>> {
    let store = name.clone();
    change(panel, Changed::Datastore(&store), move |c| {
        c.flush_datastore(&name)
    })
    .await
}

/// Begin a scrub of a datastore in two directories, cancel it, or name the directory that is right (`prefer`).
#[utoipa::path(post, path = "/v1/datastores/{name}/scrub", tag = "datastores", params(("name" = String, Path)),
    request_body = ScrubSet, responses(
    (status = 200, body = DatastoreInfo), (status = "default", body = ErrorBody)))]
async fn scrub_datastore(
    State(panel): Shared,
    Path(name): Path<String>,
    Body(set): Body<ScrubSet>,
) -> Result<Json<DatastoreInfo>> {
    run(panel, move |c| c.scrub_datastore(&name, &set)).await
}

/// Serve a datastore no longer. The directory has everything afterwards.
#[utoipa::path(post, path = "/v1/datastores/{name}/remove", tag = "datastores", params(("name" = String, Path)),
    request_body = DatastoreRemove, responses(
    (status = 200, body = Done), (status = "default", body = ErrorBody)))]
async fn remove_datastore(
    State(panel): Shared,
    Caller(by): Caller,
    Path(name): Path<String>,
    Body(how): Body<DatastoreRemove>,
) -> Result<Json<Done>> {
    let store = name.clone();
    change(panel, Changed::Datastore(&store), move |c| {
        c.remove_datastore(&name, &how)?;
        let datastore = name;
        c.events().tell(Event::DatastoreRemoved { datastore, by });
        Ok(Done { done: true })
    })
    .await
}

/// The routes of this module.
pub(super) fn routes() -> OpenApiRouter<Panel> {
    OpenApiRouter::new()
        .routes(routes!(get_datastores, add_datastore))
        .routes(routes!(get_datastore, set_datastore))
        .routes(routes!(get_datastore_files))
        .routes(routes!(get_datastore_advice))
        .routes(routes!(flush_datastore))
        .routes(routes!(scrub_datastore))
        .routes(routes!(remove_datastore))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clients_are_read() {
        let client = |text: &str| {
            let c: DatastoreClient = text.parse().unwrap();
            assert_eq!(c.to_string().parse(), Ok(c.clone()));
            (c.network, c.write, c.root)
        };
        assert_eq!(client("192.0.2.7"), ("192.0.2.7".into(), true, false));
        assert_eq!(client("::1=ro"), ("::1".into(), false, false));
        for root in ["root", "no_root_squash"] {
            assert_eq!(
                client(&format!("10.0.0.0/8=rw,{root}")),
                ("10.0.0.0/8".into(), true, true)
            );
        }
        for wrong in [
            "wr",
            "anonuid",
            "anonuid=x",
            "anongid=-1",
            "anonuid=4294967295",
            "all",
        ] {
            let text = format!("10.0.0.0/8={wrong}");
            assert!(text.parse::<DatastoreClient>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn client_options_are_kept_and_told() {
        let client = |text: &str| text.parse::<DatastoreClient>().unwrap();
        let squashed = client("192.0.2.0/24=ro,all_squash,anonuid=1000,anongid=1001,insecure");
        assert_eq!(
            squashed.to_string(),
            "192.0.2.0/24=ro,all_squash,insecure,anonuid=1000,anongid=1001"
        );
        assert_eq!(client(&squashed.to_string()), squashed);
        let told = squashed.opened();
        for part in [
            "may read;",
            "every user counts as user 1000, group 1001",
            "every account of this host",
        ] {
            assert!(told.contains(part), "{told}");
        }
        let told = client("::1").opened();
        for part in [
            "::1 may read and write",
            "root as user 65534",
            "privileged source ports only",
        ] {
            assert!(told.contains(part), "{told}");
        }
        // The last of two counts, and what is not said in JSON is as it is by itself.
        assert_eq!(
            client("::1=insecure,root,all_squash,secure,root_squash,no_all_squash"),
            client("::1")
        );
        let json = r#"{"network":"::1","write":true}"#;
        assert_eq!(
            serde_json::from_str::<DatastoreClient>(json).unwrap(),
            client("::1")
        );
    }
}
