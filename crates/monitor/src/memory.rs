//! The part that tells of the host's memory: what the memory controller beside the daemon says of itself, or, where
//! none runs, what the kernel says of the host.
//!
//! The controller's file is read and the controller not asked: one that hangs answers nobody.

use std::path::{Path, PathBuf};

use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Json, Router};
use hearth_daemon::api::types::ErrorBody;
use hearth_daemon::error::Result;
use hearth_events::time::now_ms;
use hearth_memory::plan::gaps;
use serde_json::{Value, json};

use crate::part::{Context, Part};

/// The part that tells of memory.
#[derive(Debug)]
pub struct Telling {
    /// The controller's run directory.
    pub dir: PathBuf,
}

impl Part for Telling {
    fn name(&self) -> &'static str {
        "memory"
    }

    fn run(&self, context: &Context) -> Result<()> {
        context.stop.wait_for_it();
        Ok(())
    }

    fn routes(&self) -> Router {
        let dir = self.dir.clone();
        let answer = move || {
            let dir = dir.clone();
            async move {
                // Files of /sys may take their time.
                let told = tokio::task::spawn_blocking(move || told(&dir));
                told.await.unwrap_or_else(|_| failed("it failed", ""))
            }
        };
        Router::new().route("/v1/memory", get(answer))
    }
}

fn failed(what: &str, remedy: &str) -> Response {
    let body = ErrorBody {
        error: format!("the host's memory cannot be told of: {what}"),
        remedy: remedy.to_owned(),
    };
    (StatusCode::INTERNAL_SERVER_ERROR, Json(body)).into_response()
}

fn told(dir: &Path) -> Response {
    match shown(dir) {
        Ok(value) => Json(value).into_response(),
        Err((what, remedy)) => failed(&what, &remedy),
    }
}

/// As `hearth memory status --json` says it, but for what only root can ask.
fn shown(dir: &Path) -> std::result::Result<Value, (String, String)> {
    let status = hearth_memory_host::status(dir).map_err(|fault| (fault.what, fault.remedy))?;
    let silent = status.as_ref().is_some_and(|s| s.is_silent(now_ms()));
    let controller = match &status {
        None => "off",
        Some(_) if silent => "silent",
        Some(_) => "running",
    };
    match status.filter(|_| !silent) {
        Some(status) => Ok(json!({
            "controller": controller,
            "at": status.at,
            "level": status.level,
            "helpless": status.helpless,
            "gaps": gaps(&status.seen),
            "seen": status.seen,
            "steps": status.steps,
        })),
        None => {
            let seen = hearth_memory_host::host().map_err(|what| (what, String::new()))?;
            Ok(json!({ "controller": controller, "at": now_ms(), "seen": seen, "steps": [] }))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hearth_memory::{Level, Seen, Status};

    #[test]
    fn a_controller_is_told_of_by_its_file_and_the_host_without() {
        let tmp = tempfile::tempdir().unwrap();
        let alone = shown(tmp.path()).unwrap();
        assert_eq!(alone["controller"], "off");
        assert!(alone["seen"]["total"].as_u64() > Some(0), "{alone}");
        let put = |status: &Status| {
            let text = serde_json::to_vec(status).unwrap();
            std::fs::write(tmp.path().join("status.json"), text).unwrap();
        };
        let seen = Seen {
            total: 7,
            ..Seen::default()
        };
        let mut status = Status::new(now_ms(), 1, Level::Soft, seen);
        put(&status);
        let running = shown(tmp.path()).unwrap();
        assert_eq!(running["controller"], "running");
        assert_eq!(
            (&running["level"], &running["seen"]["total"]),
            (&json!("soft"), &json!(7))
        );
        // What one said a minute ago is not how it is.
        status.at -= 60_000;
        put(&status);
        let silent = shown(tmp.path()).unwrap();
        assert_eq!(silent["controller"], "silent");
        assert_ne!(silent["seen"]["total"], json!(7));
        std::fs::write(tmp.path().join("status.json"), "{}").unwrap();
        assert!(shown(tmp.path()).is_err());
    }
}
