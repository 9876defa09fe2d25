//! Routes to the flash devices of the pool that is served: more of them, fewer, others.

use axum::Json;
use axum::extract::State;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::server::{Body, Changed, Panel, Shared, change, run};
use super::types::{Done, ErrorBody};
use crate::error::Result;

/// What is to be done about a pool's devices.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum FlashAction {
    /// One more: `new`.
    #[default]
    Add,
    /// `new` takes the place of `old`.
    Replace,
    /// `old` is emptied and taken out.
    Remove,
}

/// A change of the pool's flash devices.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct FlashChange {
    /// What is to be done.
    pub action: FlashAction,
    /// The device that goes, as the pool lists it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub old: Option<String>,
    /// The device that comes: the absolute path of a block device or file, as the daemon sees it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub new: Option<String>,
    /// Make a new file of so many bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size: Option<u64>,
    /// With `size`: only reserve the space instead of writing the file once.
    #[serde(default)]
    pub quick: bool,
    /// Overwrite what is on the new device.
    #[serde(default)]
    pub force: bool,
    /// Also if clients have to connect again.
    #[serde(default)]
    pub yes: bool,
}

/// How far a change of the pool's flash devices is.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct FlashProgress {
    /// What is done, in words.
    pub what: String,
    /// `preparing` the new device, `copying` to it, `emptying` the old one, `switching` (clients wait for a moment), `failed`
    /// or `called-off`.
    pub stage: String,
    /// Bytes of this stage that are done; when emptying, of the segments that are empty.
    pub done: u64,
    /// Bytes of this stage.
    pub total: u64,
    /// Bytes a second since this stage began.
    pub bytes_per_second: f64,
    /// When this stage is over at that rate, if that can be told.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub eta_seconds: Option<f64>,
    /// Why it failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<ErrorBody>,
}

/// The change that is under way, or ended in vain since the daemon began to run.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct FlashState {
    /// How often this process has begun anew; once more when a change has been made.
    pub generation: u64,
    /// The change, if there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub change: Option<FlashProgress>,
}

/// How far a change of the flash devices is.
#[utoipa::path(get, path = "/v1/pool/flash", tag = "pool", responses(
    (status = 200, body = FlashState), (status = "default", body = ErrorBody)))]
async fn get_flash(State(panel): Shared) -> Result<Json<FlashState>> {
    run(panel, |c| Ok(c.flash_state())).await
}

/// Begin to add, replace or remove a flash device. It is done when the generation is a higher one; the daemon has begun
/// anew then, with its clients, and how that went is what `/v1/upgrade` says.
#[utoipa::path(post, path = "/v1/pool/flash", tag = "pool", request_body = FlashChange, responses(
    (status = 200, body = FlashState), (status = "default", body = ErrorBody)))]
async fn change_flash(
    State(panel): Shared,
    Body(request): Body<FlashChange>,
) -> Result<Json<FlashState>> {
    change(panel, Changed::Pool, move |c| c.change_flash(&request)).await
}

/// Call such a change off, as long as it can be: the pool is as it was before.
#[utoipa::path(post, path = "/v1/pool/flash/cancel", tag = "pool", responses(
    (status = 200, body = Done), (status = "default", body = ErrorBody)))]
async fn cancel_flash(State(panel): Shared) -> Result<Json<Done>> {
    run(panel, |c| {
        c.cancel_flash()?;
        Ok(Done { done: true })
    })
    .await
}

pub(super) fn routes() -> OpenApiRouter<Panel> {
    OpenApiRouter::new()
        .routes(routes!(get_flash, change_flash))
        .routes(routes!(cancel_flash))
}
