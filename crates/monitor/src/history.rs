//! The part that remembers: what the daemon counted, over restarts, for ninety days.
//!
//! Looks become slots of ten seconds ([`sampler`]), which are kept in [files that cannot grow](store). Whoever
//! asks gets columns: `hearth stats --since`, and the console's charts.

pub mod row;
pub mod sampler;
pub mod store;

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use axum::extract::{Query, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Json, Router};
use hearth_daemon::api::types::ErrorBody;
use hearth_daemon::error::{Error, Result};
use hearth_events::time::now_ms;
use serde::Deserialize;

use crate::api::{HistoryInfo, HistorySum, HistorySums};
use crate::part::{Context, Part};
use crate::watch::Seen;
use row::{DISK_NAMES, FLASH_NAMES, Row};
use sampler::{FLASH, Over, POOL, Sampler};
use store::{RINGS, Store};

/// Between two looks at whether there is something new.
const EVERY: Duration = Duration::from_secs(1);
/// Between two looks for what is too old.
const EXPIRE_EVERY: Duration = Duration::from_secs(3600);
/// The directory, in the service's own.
const DIR: &str = "history";
/// Points of an answer, unless fewer are asked for.
const POINTS_MAX: usize = 1000;

/// The part that remembers.
#[derive(Debug, Default)]
pub struct Remembering {
    store: Mutex<Option<Store>>,
}

impl Remembering {
    fn store(&self) -> MutexGuard<'_, Option<Store>> {
        self.store.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps slots that are over; names of disks for which there is no room.
    fn keep(&self, over: Vec<Over>, living: &BTreeSet<&str>) -> io::Result<BTreeSet<String>> {
        let mut left_out = BTreeSet::new();
        let mut store = self.store();
        let Some(store) = store.as_mut() else {
            return Ok(left_out);
        };
        for (name, index, row) in over {
            if store.admit(&name, living)? {
                store.put(&name, index, row)?;
            } else {
                left_out.insert(name);
            }
        }
        Ok(left_out)
    }

    fn info(&self, question: &Question) -> io::Result<HistoryInfo> {
        let (name, names): (&str, &[&str]) = match (&question.disk, question.flash) {
            (Some(disk), _) => (disk, &DISK_NAMES),
            (None, true) => (FLASH, &FLASH_NAMES),
            (None, false) => (POOL, &DISK_NAMES),
        };
        let most = question.points.clamp(1, POINTS_MAX);
        let mut store = self.store();
        let (step, rows) = match store.as_mut() {
            Some(store) => store.past(name, now_ms() / 1000, question.since, most)?,
            None => (RINGS[0].step, Vec::new()),
        };
        let mut columns: BTreeMap<String, Vec<u64>> = BTreeMap::new();
        for (_, row) in &rows {
            for (name, n) in names.iter().zip(row.numbers()) {
                columns.entry((*name).to_owned()).or_default().push(n);
            }
        }
        Ok(HistoryInfo {
            step,
            at: rows.iter().map(|(at, _)| *at).collect(),
            seconds: rows.iter().map(|(_, row)| tenths(row.seconds)).collect(),
            columns,
        })
    }

    fn sums(&self, since: u64) -> io::Result<HistorySums> {
        let mut store = self.store();
        let now = now_ms() / 1000;
        let Some(store) = store.as_mut() else {
            return Ok(HistorySums::default());
        };
        let names: Vec<String> = store.names().map(str::to_owned).collect();
        let mut sums = HistorySums::default();
        for name in names {
            let (_, rows) = store.past(&name, now, since, POINTS_MAX)?;
            let Some((from, _)) = rows.first().copied() else {
                continue;
            };
            let mut all = Row::default();
            rows.iter().for_each(|(_, row)| all.add(row));
            let columns: &[&str] = if name == FLASH {
                &FLASH_NAMES
            } else {
                &DISK_NAMES
            };
            let sum = HistorySum {
                name: name.clone(),
                from,
                seconds: tenths(all.seconds),
                counted: (columns.iter().zip(all.numbers()))
                    .map(|(name, n)| ((*name).to_owned(), n))
                    .collect(),
            };
            match name.as_str() {
                POOL => sums.pool = Some(sum),
                FLASH => sums.flash = Some(sum),
                _ => sums.disks.push(sum),
            }
        }
        Ok(sums)
    }
}

fn tenths(seconds: f64) -> f64 {
    (seconds * 10.0).round() / 10.0
}

impl Part for Arc<Remembering> {
    fn name(&self) -> &'static str {
        "history"
    }

    fn run(&self, context: &Context) -> Result<()> {
        let dir = context.state.path(DIR);
        let fail = |e: io::Error| {
            Error::unavailable(
                format!("statistics cannot be kept in {}: {e}", dir.display()),
                "check its permissions, and whether there is room",
            )
        };
        // What waited when an earlier run of this part failed is not lost.
        let earlier = self.store().take();
        let store = match earlier {
            Some(store) => store,
            None => Store::open(&dir).map_err(fail)?,
        };
        *self.store() = Some(store);
        let began = Instant::now();
        let mut sampler = Sampler::default();
        let mut last: Option<Arc<Seen>> = None;
        let mut left_out = BTreeSet::new();
        let mut failing = false;
        let mut expired: Option<Instant> = None;
        loop {
            let mut outcome = Ok(());
            let seen = context.daemon.seen();
            if let Some(seen) = seen.filter(|s| last.as_ref().is_none_or(|l| !Arc::ptr_eq(l, s))) {
                let late = now_ms().saturating_sub(seen.at) as f64 / 1000.0;
                // When it was looked, which is not when it is seen here; the clock may have been set in between.
                let steady = began.elapsed().as_secs_f64() - late.min(EVERY.as_secs_f64() * 2.0);
                let over = sampler.look(steady, seen.at as f64 / 1000.0, &seen.stats);
                let disks = seen.stats.disks.iter().map(|d| d.name.as_str());
                let living: BTreeSet<&str> = disks.chain([POOL, FLASH]).collect();
                match self.keep(over, &living) {
                    Ok(names) if names != left_out => {
                        if !names.is_empty() {
                            tracing::warn!(
                                "of {} disks no statistics are kept: there is room for {}",
                                names.len(),
                                store::FILES_MAX - 2
                            );
                        }
                        left_out = names;
                    }
                    Ok(_) => {}
                    Err(e) => outcome = Err(e),
                }
                last = Some(seen);
            }
            if expired.is_none_or(|at| at.elapsed() > EXPIRE_EVERY) {
                expired = Some(Instant::now());
                if let Some(store) = self.store().as_mut() {
                    outcome = outcome.and_then(|()| store.expire(SystemTime::now()));
                }
            }
            // A full file system costs these slots, and nothing else.
            if let Err(e) = &outcome
                && !failing
            {
                tracing::error!("{}", fail(io::Error::new(e.kind(), e.to_string())));
            }
            failing = outcome.is_err();
            if context.stop.wait(EVERY) {
                break;
            }
        }
        let names = last.iter().flat_map(|seen| &seen.stats.disks);
        let living: BTreeSet<&str> = names.map(|d| d.name.as_str()).collect();
        self.keep(sampler.end(), &living).map_err(fail)?;
        match self.store().as_mut() {
            Some(store) => store.write_all().map_err(fail),
            None => Ok(()),
        }
    }

    fn routes(&self) -> Router {
        Router::new()
            .route("/v1/history", get(history))
            .route("/v1/history/disks", get(disks))
            .with_state(self.clone())
    }
}

/// What is asked.
#[derive(Clone, Debug, Deserialize)]
struct Question {
    /// A disk; without one, all together.
    disk: Option<String>,
    /// The flash, and no disks.
    #[serde(default)]
    flash: bool,
    /// Seconds before now.
    #[serde(default = "hour")]
    since: u64,
    /// Points at most.
    #[serde(default = "points")]
    points: usize,
}

fn hour() -> u64 {
    3600
}

fn points() -> usize {
    POINTS_MAX
}

type Asked = State<Arc<Remembering>>;

async fn history(part: Asked, question: Query<Question>) -> Response {
    answer(move || part.info(&question)).await
}

async fn disks(part: Asked, question: Query<Question>) -> Response {
    answer(move || part.sums(question.since)).await
}

/// Files are read where nobody waits for it but who asked.
async fn answer<T: serde::Serialize + Send + 'static>(
    work: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> Response {
    let what = match tokio::task::spawn_blocking(work).await {
        Ok(Ok(value)) => return Json(value).into_response(),
        Ok(Err(e)) => format!("the statistics cannot be read: {e}"),
        Err(_) => "the statistics could not be read".to_owned(),
    };
    let body = ErrorBody {
        error: what,
        remedy: "see the log of hearth-monitor".to_owned(),
    };
    (StatusCode::INTERNAL_SERVER_ERROR, Json(body)).into_response()
}
