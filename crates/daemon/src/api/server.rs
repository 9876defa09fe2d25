//! The control API over HTTP: routes, and the OpenAPI document made from them.
//!
//! Handlers only translate; what happens is behind [`Control`]. Control operations may wait for
//! slow origins, so they run on the daemon's workers ([`crate::workers`]): those that ask an origin
//! something at the spot where that may hang, other changes by the disk they are of. So whoever only asks
//! is answered, and a disk is added, even while other origins hang.

use std::sync::Arc;

use axum::extract::rejection::{JsonRejection, QueryRejection};
use axum::extract::{DefaultBodyLimit, FromRequest, Path, Query, Request, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::middleware::from_fn_with_state;
use axum::response::{IntoResponse, Response};
use axum::{Json, Router};
use hearth_events::{Event, Events};
use hearth_metrics::Form;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use tokio::sync::oneshot;
use utoipa::{IntoParams, OpenApi};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::advice::AdviceReport;
use super::areas::{AreaBack, AreaWanted, AreasState};
use super::authorise::{Listed, authorise};
use super::caller::Caller;
use super::datastores::{DatastoreAdd, DatastoreInfo, DatastoreRemove, DatastoreSet, FileReport};
use super::flash::{FlashChange, FlashState};
use super::listen::{SEE, refusal};
use super::stats::{DiskReport, StatsReport};
use super::swap::SwapInfo;
use super::types::{
    DiskAdd, DiskInfo, DiskMove, DiskRemove, DiskSet, Done, ErrorBody, MirrorSet, PoolExport,
    PoolInfo, ScrubSet,
};
use super::upgrade::{UpgradePlan, UpgradeRequest, UpgradeState};
use super::workload::{HistogramReport, RecordStart, Recording};
use crate::error::{Error, Kind, Result};
use crate::spot;
use crate::workers::{Class, NotTaken, Spot, Workers};

/// Longest request body: settings of one disk are a few hundred bytes.
pub(super) const BODY_MAX: usize = 64 << 10;

/// What the control API controls. All methods may block.
pub trait Control: Send + Sync + 'static {
    /// The pool being served.
    fn pool(&self) -> Result<PoolInfo>;
    /// Confirms on this host all that the pool names outside it, and uses it.
    fn accept_claims(&self) -> Result<PoolInfo>;
    /// How far a change of the pool's flash devices is.
    fn flash_state(&self) -> FlashState;
    /// Begins to add, replace or remove one.
    fn change_flash(&self, request: &FlashChange) -> Result<FlashState>;
    /// Calls that off.
    fn cancel_flash(&self) -> Result<()>;
    /// What the host swaps to of what Hearth made.
    fn swap(&self) -> Result<SwapInfo>;
    /// What is set aside for the kernel's swap.
    fn areas(&self) -> AreasState;
    /// Begins to set some aside.
    fn set_aside(&self, wanted: &AreaWanted) -> Result<AreasState>;
    /// Begins to give some back.
    fn give_area_back(&self, back: &AreaBack) -> Result<AreasState>;
    /// Begins to write everything dirty to the origins, and then to stop.
    fn export_pool(&self, how: PoolExport) -> Result<()>;
    /// All disks, by name.
    fn disks(&self) -> Result<Vec<DiskInfo>>;
    /// One disk.
    fn disk(&self, name: &str) -> Result<DiskInfo>;
    /// Where an operation that asks the origin of a disk something may get stuck.
    fn spot_of(&self, name: &str) -> Result<Spot>;
    /// Adds a disk and serves it.
    fn add(&self, disk: DiskAdd) -> Result<DiskInfo>;
    /// Changes settings.
    fn set(&self, name: &str, set: DiskSet) -> Result<DiskInfo>;
    /// Begins to write everything dirty to the origin.
    fn flush(&self, name: &str) -> Result<DiskInfo>;
    /// Calls off a flush or a removal.
    fn cancel(&self, name: &str) -> Result<DiskInfo>;
    /// Begins to remove a disk.
    fn remove(&self, name: &str, how: DiskRemove) -> Result<DiskInfo>;
    /// Gives up ranges whose only copy was lost; they read as the origin has them.
    fn accept_loss(&self, name: &str, by: &str) -> Result<DiskInfo>;
    /// Makes a scratch disk empty.
    fn reset(&self, name: &str) -> Result<DiskInfo>;
    /// Changes the legs of a mirrored disk, and how they are copied to.
    fn set_mirror(&self, name: &str, set: &MirrorSet) -> Result<DiskInfo>;
    /// Gives a disk that lives on flash an origin while it is served.
    fn move_disk(&self, name: &str, to: &DiskMove) -> Result<DiskInfo>;
    /// All figures, for Prometheus.
    fn metrics(&self, form: Form) -> String;
    /// Begins a scrub of a mirrored disk, calls it off, or says which leg is right.
    fn set_scrub(&self, name: &str, set: &ScrubSet) -> Result<DiskInfo>;
    /// What happened, and where more is told.
    fn events(&self) -> &Arc<Events>;
    /// All statistics.
    fn stats(&self) -> Result<StatsReport>;
    /// Statistics of one disk.
    fn disk_stats(&self, name: &str) -> Result<DiskReport>;
    /// What was counted of a disk's requests; with `reset` counting begins anew.
    fn histogram(&self, name: &str, reset: bool) -> Result<HistogramReport>;
    /// What more or less flash would do, for one disk or for all.
    fn advice(&self, name: Option<&str>) -> Result<AdviceReport>;
    /// Keeps for one disk, or for all, the flash the advice gives it.
    fn apply_advice(&self, name: Option<&str>) -> Result<AdviceReport>;
    /// Begins to record a disk's requests.
    fn record(&self, name: &str, start: RecordStart) -> Result<Recording>;
    /// Ends a recording.
    fn stop_recording(&self, name: &str) -> Result<Recording>;
    /// All datastores, by name.
    fn datastores(&self) -> Result<Vec<DatastoreInfo>>;
    /// One datastore.
    fn datastore(&self, name: &str) -> Result<DatastoreInfo>;
    /// The files of a datastore that are disks, or were.
    fn datastore_files(&self, name: &str) -> Result<Vec<FileReport>>;
    /// Advice for the files of a datastore.
    fn datastore_advice(&self, name: &str) -> Result<AdviceReport>;
    /// Serves a directory as a datastore.
    fn add_datastore(&self, add: DatastoreAdd) -> Result<DatastoreInfo>;
    /// Changes settings of a datastore.
    fn set_datastore(&self, name: &str, set: DatastoreSet) -> Result<DatastoreInfo>;
    /// Begins to write everything of a datastore to its directory.
    fn flush_datastore(&self, name: &str) -> Result<DatastoreInfo>;
    /// Begins a scrub of a datastore in two directories, cancels it, or decides what it found.
    fn scrub_datastore(&self, name: &str, set: &ScrubSet) -> Result<DatastoreInfo>;
    /// Serves a datastore no longer.
    fn remove_datastore(&self, name: &str, how: &DatastoreRemove) -> Result<()>;
    /// Which version runs, and how the last upgrade went.
    fn upgrade_state(&self) -> UpgradeState;
    /// Whether a program could take over, and who would notice.
    fn check_upgrade(&self, request: &UpgradeRequest) -> Result<UpgradePlan>;
    /// Begins to have a program take over.
    fn upgrade(&self, request: &UpgradeRequest) -> Result<UpgradePlan>;
}

/// What handlers need.
#[derive(Clone)]
pub(super) struct Panel {
    control: Arc<dyn Control>,
    workers: Arc<Workers>,
}

pub(super) type Shared = State<Panel>;

impl IntoResponse for Error {
    fn into_response(self) -> Response {
        let status = match self.kind {
            Kind::Invalid => StatusCode::BAD_REQUEST,
            Kind::NotFound => StatusCode::NOT_FOUND,
            Kind::Conflict => StatusCode::CONFLICT,
            Kind::Refused => StatusCode::PRECONDITION_FAILED,
            Kind::Unavailable => StatusCode::SERVICE_UNAVAILABLE,
            Kind::Internal => StatusCode::INTERNAL_SERVER_ERROR,
        };
        (status, Json(ErrorBody::from(self))).into_response()
    }
}

/// A JSON body whose faults are reported like every other error.
pub(super) struct Body<T>(pub T);

impl<T: DeserializeOwned, S: Send + Sync> FromRequest<S> for Body<T> {
    type Rejection = Error;

    async fn from_request(request: Request, state: &S) -> Result<Self> {
        match Json::<T>::from_request(request, state).await {
            Ok(Json(value)) => Ok(Body(value)),
            Err(rejection) => {
                let remedy = "see the API's description at /v1/openapi.json";
                let what = match &rejection {
                    JsonRejection::MissingJsonContentType(_) => {
                        "the request has no `Content-Type: application/json`".to_owned()
                    }
                    JsonRejection::BytesRejection(_) => {
                        format!(
                            "the request's body could not be read or is longer than {BODY_MAX} bytes"
                        )
                    }
                    other => {
                        // What was wrong in the body, without the library's words around it.
                        let why = std::error::Error::source(other);
                        let why = why.map_or_else(|| other.body_text(), ToString::to_string);
                        format!("the request is not understood: {why}")
                    }
                };
                Err(Error::invalid(what, remedy))
            }
        }
    }
}

impl From<NotTaken> for Error {
    fn from(why: NotTaken) -> Error {
        Error::unavailable(why.to_string(), why.remedy())
    }
}

pub(super) async fn run_at<T: Send + 'static>(
    panel: Panel,
    spot: Spot,
    class: Class,
    work: impl FnOnce(&dyn Control) -> Result<T> + Send + 'static,
) -> Result<Json<T>> {
    let (told, done) = oneshot::channel();
    let Panel { control, workers } = panel;
    workers.run(&spot, class, move || {
        // The client may have gone away.
        let _ = told.send(work(&*control));
    })?;
    match done.await {
        Ok(result) => result.map(Json),
        Err(_) => Err(Error::internal("a control operation ended abnormally")),
    }
}

/// Asks something; waits for no origin.
pub(super) async fn run<T: Send + 'static>(
    panel: Panel,
    work: impl FnOnce(&dyn Control) -> Result<T> + Send + 'static,
) -> Result<Json<T>> {
    run_at(panel, Spot::new("the daemon"), Class::Answer, work).await
}

/// Changes something, but asks no origin. Changes of one disk wait for each other.
pub(super) async fn change<T: Send + 'static>(
    panel: Panel,
    what: Changed<'_>,
    work: impl FnOnce(&dyn Control) -> Result<T> + Send + 'static,
) -> Result<Json<T>> {
    let spot = match what {
        Changed::Disk(name) => format!("disk {name}"),
        Changed::Pool => "the pool".to_owned(),
        Changed::Datastore(name) => format!("datastore {name}"),
    };
    run_at(panel, Spot::new(spot), Class::Asked, work).await
}

/// What a change is of.
pub(super) enum Changed<'a> {
    /// The disk of this name.
    Disk(&'a str),
    /// The pool, or all its disks.
    Pool,
    /// The datastore of this name.
    Datastore(&'a str),
}

/// Changes something after asking an origin, which may take as long as it likes.
pub(super) async fn change_at<T: Send + 'static>(
    panel: Panel,
    find: impl FnOnce(&dyn Control) -> Result<Spot> + Send + 'static,
    work: impl FnOnce(&dyn Control) -> Result<T> + Send + 'static,
) -> Result<Json<T>> {
    let Json(spot) = run(panel.clone(), find).await?;
    run_at(panel, spot, Class::Asked, work).await
}

/// The pool being served.
#[utoipa::path(get, path = "/v1/pool", tag = "pool", responses(
    (status = 200, body = PoolInfo), (status = "default", body = ErrorBody)))]
async fn get_pool(State(panel): Shared) -> Result<Json<PoolInfo>> {
    run(panel, |c| c.pool()).await
}

/// Confirm all that the pool names outside it on this host: origins, directories, addresses and clients. Only for root and the
/// user who runs the daemon.
#[utoipa::path(post, path = "/v1/pool/accept", tag = "pool", responses(
    (status = 200, body = PoolInfo), (status = "default", body = ErrorBody)))]
async fn accept_claims(State(panel): Shared, Caller(by): Caller) -> Result<Json<PoolInfo>> {
    change(panel, Changed::Pool, move |c| {
        let info = c.accept_claims()?;
        tracing::info!(%by, "all that the pool names outside it was confirmed");
        Ok(info)
    })
    .await
}

/// Write everything dirty to the origins, and stop the daemon, which leaves the pool clean.
#[utoipa::path(post, path = "/v1/pool/export", tag = "pool", request_body = Option<PoolExport>,
    responses((status = 200, body = Done), (status = "default", body = ErrorBody)))]
async fn export_pool(
    State(panel): Shared,
    Caller(by): Caller,
    request: Request,
) -> Result<Json<Done>> {
    // Without a body it is as it always was, as long as no clients are connected.
    let bare = request.headers().get("content-type").is_none();
    let how = if bare {
        PoolExport::default()
    } else {
        Body::<PoolExport>::from_request(request, &()).await?.0
    };
    change(panel, Changed::Pool, move |c| {
        c.export_pool(how)?;
        c.events().tell(Event::PoolExport { by });
        Ok(Done { done: true })
    })
    .await
}

/// All disks, by name.
#[utoipa::path(get, path = "/v1/disks", tag = "disks", responses(
    (status = 200, body = Vec<DiskInfo>), (status = "default", body = ErrorBody)))]
async fn get_disks(State(panel): Shared) -> Result<Json<Vec<DiskInfo>>> {
    run(panel, |c| c.disks()).await
}

/// Add a disk and serve it.
#[utoipa::path(post, path = "/v1/disks", tag = "disks", request_body = DiskAdd, responses(
    (status = 200, body = DiskInfo), (status = "default", body = ErrorBody)))]
async fn add_disk(
    State(panel): Shared,
    Caller(by): Caller,
    Body(disk): Body<DiskAdd>,
) -> Result<Json<DiskInfo>> {
    let origin = disk.origin.clone();
    let find = move |_: &dyn Control| Ok(spot::of(&origin));
    let work = move |c: &dyn Control| {
        let name = disk.name.clone();
        let new = c.disk(&name).is_err();
        let outcome = c.add(disk);
        // One that was added and cannot be served is an error, too.
        if let Ok(info) = c.disk(&name)
            && new
        {
            c.events().tell(Event::DiskAdded {
                disk: name,
                origin: info.origin,
                mode: info.settings.mode.word().to_owned(),
                by,
            });
        }
        outcome
    };
    change_at(panel, find, work).await
}

/// One disk.
#[utoipa::path(get, path = "/v1/disks/{name}", tag = "disks", params(("name" = String, Path)), responses(
    (status = 200, body = DiskInfo), (status = "default", body = ErrorBody)))]
async fn get_disk(State(panel): Shared, Path(name): Path<String>) -> Result<Json<DiskInfo>> {
    run(panel, move |c| c.disk(&name)).await
}

/// Change settings of a disk; no restart, no interruption.
#[utoipa::path(patch, path = "/v1/disks/{name}", tag = "disks", params(("name" = String, Path)),
    request_body = DiskSet, responses(
    (status = 200, body = DiskInfo), (status = "default", body = ErrorBody)))]
async fn set_disk(
    State(panel): Shared,
    Caller(by): Caller,
    Path(name): Path<String>,
    Body(set): Body<DiskSet>,
) -> Result<Json<DiskInfo>> {
    let decides = set.trust.is_some() || set.takeover || set.sole_user;
    let asks_origin = decides || set.size_from_origin || set.allow_backing;
    let asked = name.clone();
    let what = changes(&set);
    let work = move |c: &dyn Control| {
        let info = c.set(&name, set)?;
        c.events().tell(Event::DiskChanged {
            disk: name,
            what,
            by,
        });
        Ok(info)
    };
    if asks_origin {
        change_at(panel, move |c| c.spot_of(&asked), work).await
    } else {
        change(panel, Changed::Disk(&asked), work).await
    }
}

/// The settings that somebody changes, as `name=value`.
fn changes(set: &DiskSet) -> String {
    let all = serde_json::to_value(set).unwrap_or_default();
    let given = |(name, value): (&String, &serde_json::Value)| match value {
        // Not asked for.
        serde_json::Value::Null | serde_json::Value::Bool(false)
            if *value != serde_json::Value::Bool(false)
                || ONLY_IF_ASKED.contains(&name.as_str()) =>
        {
            None
        }
        serde_json::Value::String(text) => Some(format!("{name}={text}")),
        other => Some(format!("{name}={other}")),
    };
    let all = all.as_object();
    let given: Vec<String> = all.into_iter().flatten().filter_map(given).collect();
    given.join(" ")
}

/// Of a change, what is asked for by being true.
const ONLY_IF_ASKED: [&str; 4] = ["size_from_origin", "allow_backing", "sole_user", "takeover"];

/// Begin to write everything dirty to the origin. Poll the disk for its progress.
#[utoipa::path(post, path = "/v1/disks/{name}/flush", tag = "disks", params(("name" = String, Path)), responses(
    (status = 200, body = DiskInfo), (status = "default", body = ErrorBody)))]
async fn flush_disk(State(panel): Shared, Path(name): Path<String>) -> Result<Json<DiskInfo>> {
    let disk = name.clone();
    change(panel, Changed::Disk(&disk), move |c| c.flush(&name)).await
}

/// Begin to remove a disk: no new connections, write everything dirty to the origin, forget it.
/// Poll the disk until it is gone.
#[utoipa::path(post, path = "/v1/disks/{name}/remove", tag = "disks", params(("name" = String, Path)),
    request_body = DiskRemove, responses(
    (status = 200, body = DiskInfo), (status = "default", body = ErrorBody)))]
async fn remove_disk(
    State(panel): Shared,
    Path(name): Path<String>,
    Body(how): Body<DiskRemove>,
) -> Result<Json<DiskInfo>> {
    let disk = name.clone();
    change(panel, Changed::Disk(&disk), move |c| c.remove(&name, how)).await
}

/// Call off a flush or a removal. What was written to the origin stays written, the rest stays on flash.
#[utoipa::path(post, path = "/v1/disks/{name}/cancel", tag = "disks", params(("name" = String, Path)), responses(
    (status = 200, body = DiskInfo), (status = "default", body = ErrorBody)))]
async fn cancel_disk(State(panel): Shared, Path(name): Path<String>) -> Result<Json<DiskInfo>> {
    let disk = name.clone();
    change(panel, Changed::Disk(&disk), move |c| c.cancel(&name)).await
}

/// Make a served disk a mirror, change the legs of one, or how they are copied to.
#[utoipa::path(post, path = "/v1/disks/{name}/mirror", tag = "disks", params(("name" = String, Path)),
    request_body = MirrorSet, responses(
    (status = 200, body = DiskInfo), (status = "default", body = ErrorBody)))]
async fn set_mirror(
    State(panel): Shared,
    Path(name): Path<String>,
    Body(set): Body<MirrorSet>,
) -> Result<Json<DiskInfo>> {
    let asked = name.clone();
    // A new leg is opened, wherever it is.
    let find = move |c: &dyn Control| match &set.add {
        Some(leg) => Ok((crate::spot::of(leg), set)),
        None => c.spot_of(&asked).map(|spot| (spot, set)),
    };
    let Json((spot, set)) = run(panel.clone(), find).await?;
    run_at(panel, spot, Class::Asked, move |c| {
        c.set_mirror(&name, &set)
    })
    .await
}

/// Give a disk that lives on flash an origin while it is served: a new file, to which all that it has is written in the background. Or have one with an origin live on flash alone.
#[utoipa::path(post, path = "/v1/disks/{name}/move", tag = "disks", params(("name" = String, Path)),
    request_body = DiskMove, responses(
    (status = 200, body = DiskInfo), (status = "default", body = ErrorBody)))]
async fn move_disk(
    State(panel): Shared,
    Path(name): Path<String>,
    Body(to): Body<DiskMove>,
) -> Result<Json<DiskInfo>> {
    let asked = name.clone();
    let find = move |c: &dyn Control| match &to.origin {
        // It is made there.
        Some(origin) => Ok((crate::spot::of(origin), to)),
        None => c.spot_of(&asked).map(|spot| (spot, to)),
    };
    let Json((spot, to)) = run(panel.clone(), find).await?;
    run_at(panel, spot, Class::Asked, move |c| c.move_disk(&name, &to)).await
}

/// Compare the legs of a mirrored disk with one another and with what is cached while it is served, or call that off.
#[utoipa::path(post, path = "/v1/disks/{name}/scrub", tag = "disks", params(("name" = String, Path)),
    request_body = ScrubSet, responses(
    (status = 200, body = DiskInfo), (status = "default", body = ErrorBody)))]
async fn set_scrub(
    State(panel): Shared,
    Path(name): Path<String>,
    Body(set): Body<ScrubSet>,
) -> Result<Json<DiskInfo>> {
    run(panel, move |c| c.set_scrub(&name, &set)).await
}

/// Give up the ranges whose only copy was lost with the flash: they read as the origin has them.
#[utoipa::path(post, path = "/v1/disks/{name}/accept-loss", tag = "disks", params(("name" = String, Path)), responses(
    (status = 200, body = DiskInfo), (status = "default", body = ErrorBody)))]
async fn accept_loss(
    State(panel): Shared,
    Caller(by): Caller,
    Path(name): Path<String>,
) -> Result<Json<DiskInfo>> {
    let disk = name.clone();
    change(panel, Changed::Disk(&disk), move |c| {
        c.accept_loss(&name, &by)
    })
    .await
}

/// Empties a scratch disk without clients: all of it reads as zeros, including blocks that a crash made unreadable.
#[utoipa::path(post, path = "/v1/disks/{name}/reset", tag = "disks", params(("name" = String, Path)), responses(
    (status = 200, body = DiskInfo), (status = "default", body = ErrorBody)))]
async fn reset_disk(State(panel): Shared, Path(name): Path<String>) -> Result<Json<DiskInfo>> {
    let disk = name.clone();
    change(panel, Changed::Disk(&disk), move |c| c.reset(&name)).await
}

/// Which statistics a client asks for.
#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
struct StatsQuery {
    /// `false` leaves out single disks; the pool's totals contain them. Default: `true`.
    #[param(required = false)]
    #[serde(default = "with_disks")]
    disks: bool,
}

fn with_disks() -> bool {
    true
}

/// Statistics of the pool and of each disk.
#[utoipa::path(get, path = "/v1/stats", tag = "statistics", params(StatsQuery), responses(
    (status = 200, body = StatsReport), (status = "default", body = ErrorBody)))]
async fn get_stats(
    State(panel): Shared,
    query: std::result::Result<Query<StatsQuery>, QueryRejection>,
) -> Result<Json<StatsReport>> {
    let Query(query) = understood(query)?;
    run(panel, move |c| {
        let mut report = c.stats()?;
        if !query.disks {
            report.disks.clear();
        }
        Ok(report)
    })
    .await
}

/// The parameters of a request, or an error that names the wrong one.
pub(super) fn understood<T>(
    query: std::result::Result<Query<T>, QueryRejection>,
) -> Result<Query<T>> {
    query.map_err(|e| {
        Error::invalid(
            format!("the question is not understood: {}", e.body_text()),
            "see the API's description at /v1/openapi.json",
        )
    })
}

/// Statistics of one disk.
#[utoipa::path(get, path = "/v1/disks/{name}/stats", tag = "statistics", params(("name" = String, Path)), responses(
    (status = 200, body = DiskReport), (status = "default", body = ErrorBody)))]
async fn get_disk_stats(
    State(panel): Shared,
    Path(name): Path<String>,
) -> Result<Json<DiskReport>> {
    run(panel, move |c| c.disk_stats(&name)).await
}

/// All figures, for Prometheus: in OpenMetrics if that is accepted, else in its older text form.
#[utoipa::path(get, path = "/metrics", tag = "statistics", responses(
    (status = 200, body = String, content_type = "text/plain"), (status = "default", body = ErrorBody)))]
async fn get_metrics(State(panel): Shared, headers: HeaderMap) -> Result<Response> {
    let accept = headers.get(header::ACCEPT).and_then(|a| a.to_str().ok());
    let form = Form::accepted(accept);
    let Json(page) = run(panel, move |c| Ok(c.metrics(form))).await?;
    Ok(([(header::CONTENT_TYPE, form.content_type())], page).into_response())
}

/// This document.
#[utoipa::path(get, path = "/v1/openapi.json", tag = "about", responses((status = 200, body = Object)))]
async fn get_openapi() -> Response {
    ([("content-type", "application/json")], document()).into_response()
}

#[derive(OpenApi)]
#[openapi(
    info(
        title = "Hearth control API",
        description = "Controls one Hearth daemon over its unix socket. Sizes are bytes. \
            Errors carry what is wrong and what to do about it.",
        license(name = "Apache-2.0", identifier = "Apache-2.0")
    ),
    tags(
        (name = "pool", description = "The pool being served"),
        (name = "disks", description = "Virtual disks"),
        (name = "datastores", description = "Directories served whole, over NFS"),
        (name = "events", description = "What happened; kinds and their names in docs/events.md"),
        (name = "statistics", description = "Counters, windows, latencies; defined in docs/statistics.md"),
        (name = "workload", description = "What guests do to a disk: histograms, recordings, advice"),
        (name = "about", description = "The API itself")
    )
)]
struct Document;

fn api() -> OpenApiRouter<Panel> {
    OpenApiRouter::with_openapi(Document::openapi())
        .routes(routes!(get_pool))
        .routes(routes!(accept_claims))
        .routes(routes!(export_pool))
        .routes(routes!(get_disks, add_disk))
        .routes(routes!(get_disk, set_disk))
        .routes(routes!(flush_disk))
        .routes(routes!(remove_disk))
        .routes(routes!(cancel_disk))
        .routes(routes!(accept_loss))
        .routes(routes!(reset_disk))
        .routes(routes!(set_mirror))
        .routes(routes!(move_disk))
        .routes(routes!(set_scrub))
        .routes(routes!(get_stats))
        .routes(routes!(get_disk_stats))
        .routes(routes!(get_metrics))
        .routes(routes!(get_openapi))
        .merge(super::datastores::routes())
        .merge(super::events::routes())
        .merge(super::look::routes())
        .merge(super::areas::routes())
        .merge(super::flash::routes())
        .merge(super::swap::routes())
        .merge(super::watching::routes())
        .merge(super::upgrade::routes())
}

/// The OpenAPI document, as committed in `docs/openapi.json`.
pub fn document() -> String {
    let (_, document) = api().split_for_parts();
    // Infallible: strings and maps only.
    let mut text = document.to_pretty_json().unwrap_or_default();
    text.push('\n');
    text
}

/// The API's routes over `control`, whose operations run on `workers`. Others than root may name what is `listed`.
pub fn router(control: Arc<dyn Control>, workers: Arc<Workers>, listed: Listed) -> Router {
    let (router, _) = api().split_for_parts();
    let panel = Panel { control, workers };
    let guard = (panel.clone(), Arc::new(listed));
    router
        .route_layer(from_fn_with_state(guard, authorise))
        .fallback(|| async {
            refusal(
                StatusCode::NOT_FOUND,
                "there is no such path in the API",
                SEE,
            )
        })
        .method_not_allowed_fallback(|| async {
            refusal(
                StatusCode::METHOD_NOT_ALLOWED,
                "this path does not take that method",
                SEE,
            )
        })
        .layer(DefaultBodyLimit::max(BODY_MAX))
        .with_state(panel)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_committed_document_is_current() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/openapi.json");
        let current = document();
        if std::env::var_os("HEARTH_WRITE_OPENAPI").is_some() {
            std::fs::write(path, &current).unwrap();
        }
        let committed = std::fs::read_to_string(path).unwrap_or_default();
        assert!(
            committed == current,
            "docs/openapi.json is out of date; write it anew with \
             `HEARTH_WRITE_OPENAPI=1 cargo test -p hearth-daemon the_committed_document_is_current`"
        );
    }

    #[test]
    fn every_route_has_a_success_and_an_error() {
        let document: serde_json::Value = serde_json::from_str(&document()).unwrap();
        let paths = document["paths"].as_object().unwrap();
        assert!(paths.len() >= 10);
        for (path, methods) in paths {
            for (method, operation) in methods.as_object().unwrap() {
                let responses = operation["responses"].as_object().unwrap();
                assert!(responses.contains_key("200"), "{method} {path}");
                assert!(
                    responses.contains_key("default") || path.ends_with("openapi.json"),
                    "{method} {path}"
                );
                assert!(
                    !operation["summary"].as_str().unwrap_or_default().is_empty(),
                    "{method} {path}"
                );
            }
        }
    }
}
