//! What the host swaps to of what Hearth made, as `hearth swap show` tells it.
//!
//! The daemon is not in the way of a page, and asks the kernel and a file of its state directory only. It answers here
//! because the file is its owner's alone, and whoever shows a host from elsewhere has nobody else to ask.

use axum::Json;
use axum::extract::State;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::server::{Panel, Shared, run};
use super::types::ErrorBody;
use crate::error::Result;

/// Swap of this host that Hearth made.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct SwapInfo {
    /// In the order in which they were made.
    pub areas: Vec<SwapArea>,
    /// What was set on the host for them.
    pub settings: Vec<SwapSetting>,
}

/// What the host can swap to.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct SwapArea {
    /// Its file.
    pub path: String,
    /// Bytes of the file.
    pub size: u64,
    /// Bytes that are swapped out to it.
    pub used: u64,
    /// Of several areas, that with the highest is filled first.
    pub priority: u16,
    /// The kernel swaps to it.
    pub on: bool,
}

/// A setting of the host, and what it was before.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct SwapSetting {
    /// Its file.
    pub path: String,
    /// What was in it.
    pub before: String,
    /// What is in it now.
    pub now: String,
    /// Why.
    pub why: String,
}

/// The host's swap that Hearth made, and what was set for it.
#[utoipa::path(get, path = "/v1/swap", tag = "pool", responses(
    (status = 200, body = SwapInfo), (status = "default", body = ErrorBody)))]
async fn get_swap(State(panel): Shared) -> Result<Json<SwapInfo>> {
    run(panel, |c| c.swap()).await
}

pub(super) fn routes() -> OpenApiRouter<Panel> {
    OpenApiRouter::new().routes(routes!(get_swap))
}
