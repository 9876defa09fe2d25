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
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct SwapInfo {
    /// In the order in which they were made.
    pub areas: Vec<SwapArea>,
    /// What was set on the host for them.
    pub settings: Vec<SwapSetting>,
    /// Why the swap file cannot be read back; absent if it can, or if that is unknown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trouble: Option<String>,
    /// What goes over the flash that swap and the cache share, in the last second; absent where none of the areas is in the pool.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub traffic: Option<SwapTraffic>,
    /// What may be written to the flash, by the cache and swap together; absent without `--endurance`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub endurance: Option<Endurance>,
}

/// What may be written to flash (`serve --endurance`), and who wrote. What is swapped out counts as what the cache writes does.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Endurance {
    /// Bytes a second in the long run.
    pub bytes_per_s: u64,
    /// Bytes that may be written now; an hour's worth may be saved up. Negative while more was written, for what guests write and
    /// what is swapped out is not refused.
    pub left: i64,
    /// How much of it is used up lately, 0 to 1: the cache fills less as it grows, not at all at 1.
    pub used: f64,
    /// Bytes that the cache wrote since the start.
    pub cache_write_bytes: u64,
    /// Bytes that were swapped out there since the start, as far as the kernel tells.
    pub swap_write_bytes: u64,
}

/// What swap and the cache read and write on flash.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct SwapTraffic {
    /// Bytes a second that come back from swap.
    pub swap_read_bytes_per_s: u64,
    /// Bytes a second that are swapped out.
    pub swap_write_bytes_per_s: u64,
    /// Bytes a second that the cache reads from flash.
    pub cache_read_bytes_per_s: u64,
    /// Bytes a second that the cache writes to flash.
    pub cache_write_bytes_per_s: u64,
    /// Microseconds until a page is back, on average; absent where too few came.
    pub latency_us: Option<u64>,
    /// Microseconds that are usual: the least of late.
    pub usual_latency_us: Option<u64>,
    /// Pages take several times what is usual, and the cache leaves what nobody waits for.
    pub cache_stands_back: bool,
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
