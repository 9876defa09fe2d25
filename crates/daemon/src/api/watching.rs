//! Routes to what is known of a disk's workload.

use axum::Json;
use axum::extract::{Path, State};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::advice::AdviceReport;
use super::server::{Body, Changed, Panel, Shared, change, run};
use super::types::ErrorBody;
use super::workload::{HistogramReport, RecordStart, Recording};
use crate::error::Result;

/// What the guest does to a disk: lengths, distances, latencies, queue depths, times between
/// requests, in vscsiStats' buckets.
#[utoipa::path(get, path = "/v1/disks/{name}/histogram", tag = "workload", params(("name" = String, Path)), responses(
    (status = 200, body = HistogramReport), (status = "default", body = ErrorBody)))]
async fn get_histogram(
    State(panel): Shared,
    Path(name): Path<String>,
) -> Result<Json<HistogramReport>> {
    run(panel, move |c| c.histogram(&name, false)).await
}

/// Begin the histograms of a disk anew; answers with what they held.
#[utoipa::path(post, path = "/v1/disks/{name}/histogram/reset", tag = "workload", params(("name" = String, Path)), responses(
    (status = 200, body = HistogramReport), (status = "default", body = ErrorBody)))]
async fn reset_histogram(
    State(panel): Shared,
    Path(name): Path<String>,
) -> Result<Json<HistogramReport>> {
    run(panel, move |c| c.histogram(&name, true)).await
}

/// Begin to record a disk's requests into a file of the daemon's host. The disk's own
/// description says how far it is.
#[utoipa::path(post, path = "/v1/disks/{name}/recording", tag = "workload", params(("name" = String, Path)),
    request_body = RecordStart, responses(
    (status = 200, body = Recording), (status = "default", body = ErrorBody)))]
async fn start_recording(
    State(panel): Shared,
    Path(name): Path<String>,
    Body(start): Body<RecordStart>,
) -> Result<Json<Recording>> {
    let disk = name.clone();
    change(panel, Changed::Disk(&disk), move |c| c.record(&name, start)).await
}

/// End a recording; its file is complete when this is answered.
#[utoipa::path(post, path = "/v1/disks/{name}/recording/stop", tag = "workload", params(("name" = String, Path)), responses(
    (status = 200, body = Recording), (status = "default", body = ErrorBody)))]
async fn stop_recording(State(panel): Shared, Path(name): Path<String>) -> Result<Json<Recording>> {
    let disk = name.clone();
    change(panel, Changed::Disk(&disk), move |c| {
        c.stop_recording(&name)
    })
    .await
}

/// What more or less flash would do for every disk, and how the pool is best divided.
#[utoipa::path(get, path = "/v1/advice", tag = "workload", responses(
    (status = 200, body = AdviceReport), (status = "default", body = ErrorBody)))]
async fn get_advice(State(panel): Shared) -> Result<Json<AdviceReport>> {
    run(panel, |c| c.advice(None)).await
}

/// Keep for every disk the flash the advice gives it, until the daemon stops.
#[utoipa::path(post, path = "/v1/advice/apply", tag = "workload", responses(
    (status = 200, body = AdviceReport), (status = "default", body = ErrorBody)))]
async fn apply_advice(State(panel): Shared) -> Result<Json<AdviceReport>> {
    change(panel, Changed::Pool, |c| c.apply_advice(None)).await
}

/// What more or less flash would do for a disk. The division is still over all.
#[utoipa::path(get, path = "/v1/disks/{name}/advice", tag = "workload", params(("name" = String, Path)), responses(
    (status = 200, body = AdviceReport), (status = "default", body = ErrorBody)))]
async fn get_disk_advice(
    State(panel): Shared,
    Path(name): Path<String>,
) -> Result<Json<AdviceReport>> {
    run(panel, move |c| c.advice(Some(&name))).await
}

/// Keep for a disk the flash the advice gives it, until the daemon stops.
#[utoipa::path(post, path = "/v1/disks/{name}/advice/apply", tag = "workload", params(("name" = String, Path)), responses(
    (status = 200, body = AdviceReport), (status = "default", body = ErrorBody)))]
async fn apply_disk_advice(
    State(panel): Shared,
    Path(name): Path<String>,
) -> Result<Json<AdviceReport>> {
    change(panel, Changed::Pool, move |c| c.apply_advice(Some(&name))).await
}

/// The routes of this file.
pub(super) fn routes() -> OpenApiRouter<Panel> {
    OpenApiRouter::new()
        .routes(routes!(get_histogram))
        .routes(routes!(reset_histogram))
        .routes(routes!(start_recording))
        .routes(routes!(stop_recording))
        .routes(routes!(get_advice))
        .routes(routes!(apply_advice))
        .routes(routes!(get_disk_advice))
        .routes(routes!(apply_disk_advice))
}
