//! Routes to what of the pool's flash is set aside for the kernel's swap.

use axum::Json;
use axum::extract::State;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::flash::FlashProgress;
use super::server::{Body, Changed, Panel, Shared, change, run};
use super::types::ErrorBody;
use crate::error::Result;

/// A stretch of a flash device that is set aside.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct AreaInfo {
    /// The flash device.
    pub path: String,
    /// The device's number for life.
    pub device: String,
    /// The pool's.
    pub pool: String,
    /// From which byte of the device on.
    pub offset: u64,
    /// How many bytes.
    pub bytes: u64,
    /// Loop devices that are over it.
    #[serde(default)]
    pub used_by: Vec<String>,
}

/// What is set aside, and what is being done about it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct AreasState {
    /// What is set aside.
    pub areas: Vec<AreaInfo>,
    /// The change that is under way, of the areas or of the flash devices, or failed last. Its stages are `emptying`,
    /// `setting-aside`, and `clearing` before an area is given back.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub change: Option<FlashProgress>,
}

/// What is to be set aside.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct AreaWanted {
    /// So many bytes; made whole segments.
    pub bytes: u64,
    /// On this flash device, as the pool lists it; without it on that which has most.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path: Option<String>,
}

/// Which area is to be given back.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct AreaBack {
    /// The flash device it is on.
    pub path: String,
    /// Where it begins there.
    pub offset: u64,
}

/// What of the flash is set aside for the kernel's swap.
#[utoipa::path(get, path = "/v1/pool/areas", tag = "pool", responses(
    (status = 200, body = AreasState), (status = "default", body = ErrorBody)))]
async fn get_areas(State(panel): Shared) -> Result<Json<AreasState>> {
    run(panel, |c| Ok(c.areas())).await
}

/// Begin to set some aside. What lies there is moved or dropped first, while the pool is served; `/v1/pool/flash/cancel` calls it
/// off until then. It is done when no change is told any more and the area is.
#[utoipa::path(post, path = "/v1/pool/areas", tag = "pool", request_body = AreaWanted, responses(
    (status = 200, body = AreasState), (status = "default", body = ErrorBody)))]
async fn set_aside(
    State(panel): Shared,
    Body(request): Body<AreaWanted>,
) -> Result<Json<AreasState>> {
    change(panel, Changed::Pool, move |c| c.set_aside(&request)).await
}

/// Begin to give some back, which nobody swaps to any more. All of it is overwritten first. It is done when no change is told
/// any more and the area is not, either.
#[utoipa::path(post, path = "/v1/pool/areas/give-back", tag = "pool", request_body = AreaBack, responses(
    (status = 200, body = AreasState), (status = "default", body = ErrorBody)))]
async fn give_back(
    State(panel): Shared,
    Body(request): Body<AreaBack>,
) -> Result<Json<AreasState>> {
    change(panel, Changed::Pool, move |c| c.give_area_back(&request)).await
}

pub(super) fn routes() -> OpenApiRouter<Panel> {
    OpenApiRouter::new()
        .routes(routes!(get_areas, set_aside))
        .routes(routes!(give_back))
}
