//! Datastores over the control API: bodies and routes.

use std::fmt;
use std::str::FromStr;

use axum::Json;
use axum::extract::{Path, State};
use hearth_events::Event;
use hearth_fault::Fault;
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

/// Who may use a datastore, and how.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct DatastoreClient {
    /// An address, or a network such as `192.0.2.0/24`.
    pub network: String,
    /// May change files.
    #[serde(default)]
    pub write: bool,
    /// May be root; else root counts as nobody.
    #[serde(default)]
    pub root: bool,
}

/// `NETWORK=rw`, `NETWORK=ro,root` and the like, as [`FromStr`] reads it.
impl fmt::Display for DatastoreClient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let how = if self.write { "rw" } else { "ro" };
        let root = if self.root { ",root" } else { "" };
        write!(f, "{}={how}{root}", self.network)
    }
}

/// `NETWORK[=rw|ro][,root]`.
impl FromStr for DatastoreClient {
    type Err = Fault;

    fn from_str(text: &str) -> std::result::Result<DatastoreClient, Fault> {
        let (network, how) = text.split_once('=').unwrap_or((text, ""));
        let mut client = DatastoreClient {
            network: network.to_owned(),
            write: true,
            root: false,
        };
        for word in how.split(',').filter(|word| !word.is_empty()) {
            match word {
                "rw" => client.write = true,
                "ro" => client.write = false,
                "root" => client.root = true,
                _ => {
                    return Err(Fault::new(
                        format!("“{word}” is nothing a client can be allowed"),
                        "write 192.0.2.7, 192.0.2.0/24=ro or 192.0.2.7=rw,root",
                    ));
                }
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
    /// The path under which clients mount it.
    pub path: String,
    /// Who may come.
    pub clients: Vec<DatastoreClient>,
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
#[utoipa::path(post, path = "/v1/datastores/{name}/remove", tag = "datastores", params(("name" = String, Path)), responses(
    (status = 200, body = Done), (status = "default", body = ErrorBody)))]
async fn remove_datastore(
    State(panel): Shared,
    Caller(by): Caller,
    Path(name): Path<String>,
) -> Result<Json<Done>> {
    let store = name.clone();
    change(panel, Changed::Datastore(&store), move |c| {
        c.remove_datastore(&name)?;
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
        assert_eq!(
            client("10.0.0.0/8=rw,root"),
            ("10.0.0.0/8".into(), true, true)
        );
        assert!("10.0.0.0/8=wr".parse::<DatastoreClient>().is_err());
    }
}
