//! The control API over HTTP: routes, and the OpenAPI document made from them.
//!
//! Handlers only translate; what happens is behind [`Control`]. Control operations may wait for
//! slow origins, so they run on blocking threads. Those that change something may have most of
//! these, and wait for their turn without one; so whoever only asks is answered, even while an
//! origin hangs.

use std::sync::Arc;

use axum::extract::rejection::JsonRejection;
use axum::extract::{DefaultBodyLimit, FromRequest, Path, Request, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::{Json, Router};
use serde::de::DeserializeOwned;
use tokio::sync::Semaphore;
use utoipa::OpenApi;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::advice::AdviceReport;
use super::listen::{SEE, refusal};
use super::stats::{DiskReport, StatsReport};
use super::types::{DiskAdd, DiskInfo, DiskRemove, DiskSet, Done, ErrorBody, PoolExport, PoolInfo};
use super::workload::{HistogramReport, RecordStart, Recording};
use crate::error::{Error, Kind, Result};

/// Threads for control operations: one for each turn of those that may take long, and some for
/// whoever only asks, which takes no time.
pub const CONTROL_THREADS: usize = 16;
/// Turns of operations that open an origin or ask it something, for as long as it likes. Turns are
/// shared by all daemons of a process; only tests have more than one.
static OPENINGS: Semaphore = Semaphore::const_new(8);
/// Turns of other changes, which wait for one another.
pub(super) static CHANGES: Semaphore = Semaphore::const_new(4);

/// Longest request body: settings of one disk are a few hundred bytes.
pub(super) const BODY_MAX: usize = 64 << 10;

/// What the control API controls. All methods may block.
pub trait Control: Send + Sync + 'static {
    /// The pool being served.
    fn pool(&self) -> Result<PoolInfo>;
    /// Begins to write everything dirty to the origins, and then to stop.
    fn export_pool(&self, how: PoolExport) -> Result<()>;
    /// All disks, by name.
    fn disks(&self) -> Result<Vec<DiskInfo>>;
    /// One disk.
    fn disk(&self, name: &str) -> Result<DiskInfo>;
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
    fn accept_loss(&self, name: &str) -> Result<DiskInfo>;
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
}

pub(super) type Shared = State<Arc<dyn Control>>;

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

pub(super) async fn run<T: Send + 'static>(
    control: Arc<dyn Control>,
    work: impl FnOnce(&dyn Control) -> Result<T> + Send + 'static,
) -> Result<Json<T>> {
    match tokio::task::spawn_blocking(move || work(&*control)).await {
        Ok(result) => result.map(Json),
        Err(_) => Err(Error::internal("a control operation ended abnormally")),
    }
}

/// The same for what may take long: waits for its turn first.
pub(super) async fn change<T: Send + 'static>(
    control: Arc<dyn Control>,
    turns: &'static Semaphore,
    work: impl FnOnce(&dyn Control) -> Result<T> + Send + 'static,
) -> Result<Json<T>> {
    let turn = turns
        .acquire()
        .await
        .map_err(|_| Error::internal("control operations have ended"))?;
    run(control, move |c| {
        // Kept by the thread: the client may go away before the operation is done.
        let _turn = turn;
        work(c)
    })
    .await
}

/// The pool being served.
#[utoipa::path(get, path = "/v1/pool", tag = "pool", responses(
    (status = 200, body = PoolInfo), (status = "default", body = ErrorBody)))]
async fn get_pool(State(control): Shared) -> Result<Json<PoolInfo>> {
    run(control, |c| c.pool()).await
}

/// Write everything dirty to the origins, and stop the daemon, which leaves the pool clean.
#[utoipa::path(post, path = "/v1/pool/export", tag = "pool", request_body = Option<PoolExport>,
    responses((status = 200, body = Done), (status = "default", body = ErrorBody)))]
async fn export_pool(State(control): Shared, request: Request) -> Result<Json<Done>> {
    // Without a body it is as it always was, as long as no clients are connected.
    let bare = request.headers().get("content-type").is_none();
    let how = if bare {
        PoolExport::default()
    } else {
        Body::<PoolExport>::from_request(request, &()).await?.0
    };
    change(control, &CHANGES, move |c| {
        c.export_pool(how).map(|()| Done { done: true })
    })
    .await
}

/// All disks, by name.
#[utoipa::path(get, path = "/v1/disks", tag = "disks", responses(
    (status = 200, body = Vec<DiskInfo>), (status = "default", body = ErrorBody)))]
async fn get_disks(State(control): Shared) -> Result<Json<Vec<DiskInfo>>> {
    run(control, |c| c.disks()).await
}

/// Add a disk and serve it.
#[utoipa::path(post, path = "/v1/disks", tag = "disks", request_body = DiskAdd, responses(
    (status = 200, body = DiskInfo), (status = "default", body = ErrorBody)))]
async fn add_disk(State(control): Shared, Body(disk): Body<DiskAdd>) -> Result<Json<DiskInfo>> {
    change(control, &OPENINGS, move |c| c.add(disk)).await
}

/// One disk.
#[utoipa::path(get, path = "/v1/disks/{name}", tag = "disks", params(("name" = String, Path)), responses(
    (status = 200, body = DiskInfo), (status = "default", body = ErrorBody)))]
async fn get_disk(State(control): Shared, Path(name): Path<String>) -> Result<Json<DiskInfo>> {
    run(control, move |c| c.disk(&name)).await
}

/// Change settings of a disk; no restart, no interruption.
#[utoipa::path(patch, path = "/v1/disks/{name}", tag = "disks", params(("name" = String, Path)),
    request_body = DiskSet, responses(
    (status = 200, body = DiskInfo), (status = "default", body = ErrorBody)))]
async fn set_disk(
    State(control): Shared,
    Path(name): Path<String>,
    Body(set): Body<DiskSet>,
) -> Result<Json<DiskInfo>> {
    let asks_origin = set.size_from_origin || set.trust.is_some() || set.allow_backing;
    let turns = if asks_origin { &OPENINGS } else { &CHANGES };
    change(control, turns, move |c| c.set(&name, set)).await
}

/// Begin to write everything dirty to the origin. Poll the disk for its progress.
#[utoipa::path(post, path = "/v1/disks/{name}/flush", tag = "disks", params(("name" = String, Path)), responses(
    (status = 200, body = DiskInfo), (status = "default", body = ErrorBody)))]
async fn flush_disk(State(control): Shared, Path(name): Path<String>) -> Result<Json<DiskInfo>> {
    change(control, &CHANGES, move |c| c.flush(&name)).await
}

/// Begin to remove a disk: no new connections, write everything dirty to the origin, forget it.
/// Poll the disk until it is gone.
#[utoipa::path(post, path = "/v1/disks/{name}/remove", tag = "disks", params(("name" = String, Path)),
    request_body = DiskRemove, responses(
    (status = 200, body = DiskInfo), (status = "default", body = ErrorBody)))]
async fn remove_disk(
    State(control): Shared,
    Path(name): Path<String>,
    Body(how): Body<DiskRemove>,
) -> Result<Json<DiskInfo>> {
    change(control, &CHANGES, move |c| c.remove(&name, how)).await
}

/// Call off a flush or a removal. What was written to the origin stays written, the rest stays on flash.
#[utoipa::path(post, path = "/v1/disks/{name}/cancel", tag = "disks", params(("name" = String, Path)), responses(
    (status = 200, body = DiskInfo), (status = "default", body = ErrorBody)))]
async fn cancel_disk(State(control): Shared, Path(name): Path<String>) -> Result<Json<DiskInfo>> {
    change(control, &CHANGES, move |c| c.cancel(&name)).await
}

/// Give up the ranges whose only copy was lost with the flash: they read as the origin has them.
#[utoipa::path(post, path = "/v1/disks/{name}/accept-loss", tag = "disks", params(("name" = String, Path)), responses(
    (status = 200, body = DiskInfo), (status = "default", body = ErrorBody)))]
async fn accept_loss(State(control): Shared, Path(name): Path<String>) -> Result<Json<DiskInfo>> {
    change(control, &CHANGES, move |c| c.accept_loss(&name)).await
}

/// All statistics.
#[utoipa::path(get, path = "/v1/stats", tag = "statistics", responses(
    (status = 200, body = StatsReport), (status = "default", body = ErrorBody)))]
async fn get_stats(State(control): Shared) -> Result<Json<StatsReport>> {
    run(control, |c| c.stats()).await
}

/// Statistics of one disk.
#[utoipa::path(get, path = "/v1/disks/{name}/stats", tag = "statistics", params(("name" = String, Path)), responses(
    (status = 200, body = DiskReport), (status = "default", body = ErrorBody)))]
async fn get_disk_stats(
    State(control): Shared,
    Path(name): Path<String>,
) -> Result<Json<DiskReport>> {
    run(control, move |c| c.disk_stats(&name)).await
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
        (name = "statistics", description = "Counters, windows, latencies; defined in docs/statistics.md"),
        (name = "workload", description = "What guests do to a disk: histograms, recordings, advice"),
        (name = "about", description = "The API itself")
    )
)]
struct Document;

fn api() -> OpenApiRouter<Arc<dyn Control>> {
    OpenApiRouter::with_openapi(Document::openapi())
        .routes(routes!(get_pool))
        .routes(routes!(export_pool))
        .routes(routes!(get_disks, add_disk))
        .routes(routes!(get_disk, set_disk))
        .routes(routes!(flush_disk))
        .routes(routes!(remove_disk))
        .routes(routes!(cancel_disk))
        .routes(routes!(accept_loss))
        .routes(routes!(get_stats))
        .routes(routes!(get_disk_stats))
        .routes(routes!(get_openapi))
        .merge(super::watching::routes())
}

/// The OpenAPI document, as committed in `docs/openapi.json`.
pub fn document() -> String {
    let (_, document) = api().split_for_parts();
    // Infallible: strings and maps only.
    let mut text = document.to_pretty_json().unwrap_or_default();
    text.push('\n');
    text
}

/// The API's routes over `control`.
pub fn router(control: Arc<dyn Control>) -> Router {
    let (router, _) = api().split_for_parts();
    router
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
        .with_state(control)
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
