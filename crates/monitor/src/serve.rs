//! The second service's own socket: what its parts answer, on a thread of its own.

use std::os::unix::net::UnixListener;

use axum::http::StatusCode;
use axum::response::IntoResponse;
use axum::routing::get;
use axum::{Json, Router};
use hearth_daemon::api::authorise::Door;
use hearth_daemon::api::listen::{self, Limits};
use hearth_daemon::api::types::ErrorBody;
use hearth_daemon::error::{Error, Result};

use crate::api::MonitorInfo;
use crate::part::{Context, Kept};

/// The routes of all parts, and that which tells of them.
pub(crate) fn routes(parts: &[Kept], context: &Context) -> Router {
    let (kept, daemon) = (parts.to_vec(), context.daemon.clone());
    let info = move || async move {
        Json(MonitorInfo {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            daemon: daemon.info(),
            parts: kept.iter().map(Kept::info).collect(),
        })
    };
    let mut router = Router::new().route("/v1/monitor", get(info));
    for part in parts {
        router = router.merge(part.routes(context));
    }
    router.fallback(|| async {
        let body = ErrorBody {
            error: "there is no such path in this service's API".to_owned(),
            remedy: "see docs/monitor.md".to_owned(),
        };
        (StatusCode::NOT_FOUND, Json(body)).into_response()
    })
}

/// Serves until the context says stop.
pub(crate) fn serve(listener: UnixListener, router: Router, context: &Context) -> Result<()> {
    let fail = |e: std::io::Error| Error::internal(format!("cannot serve a socket: {e}"));
    listener.set_nonblocking(true).map_err(fail)?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(fail)?;
    let (tell, told) = tokio::sync::oneshot::channel();
    let stop = context.stop.clone();
    std::thread::Builder::new()
        .name("mon-stop".to_owned())
        .spawn(move || {
            stop.wait_for_it();
            // It may have ended by itself.
            let _ = tell.send(());
        })
        .map_err(fail)?;
    runtime
        .block_on(async {
            let listener = tokio::net::UnixListener::from_std(listener)?;
            listen::serve((listener, Door::Control), router, Limits::default(), told).await
        })
        .map_err(fail)
}
