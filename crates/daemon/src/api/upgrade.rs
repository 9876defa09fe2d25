//! Routes to another program taking over, and what is said of it.

use axum::Json;
use axum::extract::State;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::server::{Body, Changed, Panel, Shared, change, run};
use super::types::{ClientInfo, ErrorBody};
use crate::error::Result;

/// Which program is to take over.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct UpgradeRequest {
    /// Its absolute path, as the daemon sees it.
    pub program: String,
    /// Also if clients are at risk.
    #[serde(default)]
    pub yes: bool,
}

/// A client that has to connect again, and loses its disk if it does not.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ClientAtRisk {
    /// Its disk.
    pub disk: String,
    /// Who it is.
    pub client: ClientInfo,
    /// Why it cannot go over.
    pub why: String,
}

/// What an upgrade would do.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct UpgradePlan {
    /// The program that takes over.
    pub program: String,
    /// The version that runs.
    pub from: String,
    /// The version that takes over.
    pub to: String,
    /// How often this process has become another program so far.
    pub generation: u64,
    /// Connections that go over.
    pub carried: u64,
    /// Clients that have to connect again.
    pub at_risk: Vec<ClientAtRisk>,
}

/// How an upgrade went.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct UpgradeOutcome {
    /// When, seconds since 1970.
    pub at: u64,
    /// The version before.
    pub from: String,
    /// The version after.
    pub to: String,
    /// For so long clients waited, milliseconds.
    pub pause_ms: u64,
    /// Connections that went over.
    pub carried: u64,
    /// Connections that had to end.
    pub ended: u64,
    /// Why it is still the program before, if it is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failure: Option<String>,
}

/// Which version runs, and since when.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct UpgradeState {
    /// The version.
    pub version: String,
    /// How often this process has become another program.
    pub generation: u64,
    /// The last time, if there was one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last: Option<UpgradeOutcome>,
}

/// Which version runs, and how the last upgrade went.
#[utoipa::path(get, path = "/v1/upgrade", tag = "about", responses(
    (status = 200, body = UpgradeState), (status = "default", body = ErrorBody)))]
async fn get_upgrade(State(panel): Shared) -> Result<Json<UpgradeState>> {
    run(panel, |c| Ok(c.upgrade_state())).await
}

/// Whether a program could take over, and which clients would have to connect again. Changes nothing.
#[utoipa::path(post, path = "/v1/upgrade/check", tag = "about", request_body = UpgradeRequest, responses(
    (status = 200, body = UpgradePlan), (status = "default", body = ErrorBody)))]
async fn check_upgrade(
    State(panel): Shared,
    Body(request): Body<UpgradeRequest>,
) -> Result<Json<UpgradePlan>> {
    change(panel, Changed::Pool, move |c| c.check_upgrade(&request)).await
}

/// Begin to have another program take over. It has when the generation is a higher one.
#[utoipa::path(post, path = "/v1/upgrade", tag = "about", request_body = UpgradeRequest, responses(
    (status = 200, body = UpgradePlan), (status = "default", body = ErrorBody)))]
async fn begin_upgrade(
    State(panel): Shared,
    Body(request): Body<UpgradeRequest>,
) -> Result<Json<UpgradePlan>> {
    change(panel, Changed::Pool, move |c| c.upgrade(&request)).await
}

pub(super) fn routes() -> OpenApiRouter<Panel> {
    OpenApiRouter::new()
        .routes(routes!(get_upgrade, begin_upgrade))
        .routes(routes!(check_upgrade))
}
