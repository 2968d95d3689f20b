//! Collectives between threads that stand for ranks, against what they must give.

use evener_collectives::algorithms::Members;
use evener_collectives::mesh::{Lost, Mesh};
use evener_collectives::{adasum, number};
use proptest::prelude::*;
use std::sync::Barrier;
use std::thread;
use std::time::Duration;

/// What `run` gives on each of `size` ranks that are connected over loopback.
fn world<T: Send>(
    size: usize,
    timeout: Duration,
    run: impl Fn(usize, &Mesh) -> T + Sync,
) -> Vec<T> {
    let meshes: Vec<Mesh> = (0..size)
        .map(|rank| Mesh::new(rank, size, timeout).expect("listens"))
        .collect();
    let places: Vec<_> = meshes
        .iter()
        .map(|mesh| (vec!["127.0.0.1".to_owned()], mesh.port()))
        .collect();
    thread::scope(|scope| {
        let (places, run) = (&places, &run);
        let ranks: Vec<_> = meshes
            .into_iter()
            .enumerate()
            .map(|(rank, mut mesh)| {
                scope.spawn(move || {
                    mesh.connect(places, "secret").expect("connects");
                    run(rank, &mesh)
                })
            })
            .collect();
        ranks
            .into_iter()
            .map(|rank| rank.join().expect("no panic"))
            .collect()
    })
}

const LONG: Duration = Duration::from_secs(20);

/// Rank `rank`'s data: small whole numbers, so that sums are exact in every type and order.
fn data(rank: usize, count: usize, dtype: u8) -> Vec<u8> {
    let values: Vec<f64> = (0..count)
        .map(|i| ((i * 7 + rank * 3) % 4) as f64)
        .collect();
    let mut bytes = vec![0; count * number::size(dtype)];
    number::narrow(dtype, &values, &mut bytes);
    bytes
}

fn reduced(size: usize, count: usize, dtype: u8, op: u8) -> Vec<u8> {
    let mut all = data(0, count, dtype);
    for rank in 1..size {
        number::reduce(dtype, op, &mut all, &data(rank, count, dtype));
    }
    all
}

fn members<'a>(mesh: &'a Mesh, ranks: &'a [usize]) -> Members<'a> {
    let place = ranks
        .iter()
        .position(|rank| *rank == mesh.rank())
        .expect("a member");
    Members { mesh, ranks, place }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    /// Small ones go by a tree and large ones by a ring, of any length, type and number of ranks.
    #[test]
    fn all_ranks_get_the_reduction(
        size in 1usize..6, count in prop_oneof![0usize..40, 9_000usize..40_000],
        dtype in 0u8..11, op in prop::sample::select(vec![1u8, 3, 4, 5]),
    ) {
        let every: Vec<usize> = (0..size).collect();
        let got = world(size, LONG, |rank, mesh| {
            let mut mine = data(rank, count, dtype);
            members(mesh, &every).all_reduce(&mut mine, dtype, op).map(|()| mine)
        });
        let want = reduced(size, count, dtype, op);
        for mine in got {
            prop_assert!(mine.expect("no error") == want);
        }
    }

    /// The same bits on every rank, whatever rounding does.
    #[test]
    fn sums_that_round_are_the_same_on_all(size in 2usize..6, count in 1usize..9_000, seed: u32) {
        let every: Vec<usize> = (0..size).collect();
        let got = world(size, LONG, |rank, mesh| {
            let mut state = u64::from(seed) * 31 + rank as u64 + 1;
            let values: Vec<f64> = (0..count).map(|_| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                (state >> 40) as f64 / 3e5 - 20.0
            }).collect();
            let mut mine = vec![0; 4 * count];
            number::narrow(7, &values, &mut mine);
            members(mesh, &every).all_reduce(&mut mine, 7, number::SUM).map(|()| mine)
        });
        let first = got[0].as_ref().expect("no error");
        for other in &got[1..] {
            prop_assert!(other.as_ref().expect("no error") == first);
        }
    }

    /// Parts of any length, empty ones too; and a set that is not all ranks.
    #[test]
    fn parts_go_where_they_belong(
        size in 1usize..5, root in 0usize..4, long in any::<bool>(),
        lengths in prop::collection::vec(0usize..300, 16),
    ) {
        // Ranks 1.. of one more, in a process set of their own.
        let ranks: Vec<usize> = (1..=size).collect();
        let root = root % size;
        let scale = if long { 1500 } else { 1 };
        let part = |from: usize, to: usize| lengths[from * 4 + to] * scale;
        let bytes = |from: usize, to: usize| vec![(from * 16 + to + 1) as u8; part(from, to)];
        let got = world(size + 1, LONG, |rank, mesh| -> Result<(), Lost> {
            if rank == 0 {
                return Ok(());
            }
            let me = rank - 1;
            let members = members(mesh, &ranks);
            let parts: Vec<usize> = (0..size).map(|from| part(from, 0)).collect();
            let want: Vec<u8> = (0..size).flat_map(|from| bytes(from, 0)).collect();
            let mut all = vec![0; want.len()];
            let start: usize = parts[..me].iter().sum();
            all[start..start + parts[me]].copy_from_slice(&bytes(me, 0));
            members.all_gather(&mut all, &parts)?;
            assert!(all == want, "all_gather");

            let mut mine = if me == root { want.clone() } else { vec![9; want.len()] };
            members.broadcast(&mut mine, root)?;
            assert!(mine == want, "broadcast");

            let sent: Vec<usize> = (0..size).map(|to| part(me, to)).collect();
            let out: Vec<u8> = (0..size).flat_map(|to| bytes(me, to)).collect();
            let coming: Vec<usize> = (0..size).map(|from| part(from, me)).collect();
            let want: Vec<u8> = (0..size).flat_map(|from| bytes(from, me)).collect();
            let mut into = vec![0; want.len()];
            members.all_to_all(&out, &sent, &mut into, &coming)?;
            assert!(into == want, "all_to_all");

            let count: usize = parts.iter().sum();
            let mut mine = data(me, count, 4);
            let parts: Vec<usize> = parts.iter().map(|part| part * 4).collect();
            members.reduce_scatter(&mut mine, &parts, 4, number::SUM)?;
            let start: usize = parts[..me].iter().sum();
            let own = start..start + parts[me];
            assert!(mine[own.clone()] == reduced(size, count, 4, number::SUM)[own], "scatter");
            Ok(())
        });
        for outcome in got {
            prop_assert!(outcome.is_ok());
        }
    }
}

/// Parallel vectors are averaged, orthogonal ones added; the same bits on all.
#[test]
fn adasum_of_four() {
    let ranks = [0, 1, 2, 3];
    let got = world(4, LONG, |rank, mesh| {
        let values = if rank < 2 { [2.0, 0.0] } else { [0.0, 6.0] };
        let mut mine = vec![0; 16];
        number::narrow(8, &values, &mut mine);
        adasum::adasum(&members(mesh, &ranks), &mut mine, 8).map(|()| mine)
    });
    let mut want = vec![0; 16];
    number::narrow(8, &[2.0, 6.0], &mut want);
    for mine in got {
        assert_eq!(mine.expect("no error"), want);
    }
}

/// Nobody hangs: the peers of a rank that is gone, or that has nothing to say, get an error that
/// names it.
#[test]
fn a_rank_that_is_gone_is_named() {
    let met = Barrier::new(3);
    let got = world(3, LONG, |rank, mesh| {
        met.wait();
        if rank == 1 {
            mesh.close();
            return Ok(());
        }
        let mut mine = vec![0; 1 << 20];
        let outcome = members(mesh, &[0, 1, 2]).all_reduce(&mut mine, 7, number::SUM);
        mesh.close(); // so that the error spreads
        outcome
    });
    // `Late` is what waiting it out would end with.
    assert!(
        matches!(got[0], Err(Lost::Gone { peer: 1 | 2, .. })),
        "{:?}",
        got[0]
    );
    assert!(
        matches!(got[2], Err(Lost::Gone { peer: 0 | 1, .. })),
        "{:?}",
        got[2]
    );
}

#[test]
fn a_rank_that_is_silent_is_named() {
    let done = Barrier::new(2);
    let got = world(2, Duration::from_millis(300), |rank, mesh| {
        let mut mine = vec![0; 64];
        let outcome = if rank == 0 {
            members(mesh, &[0, 1]).all_reduce(&mut mine, 7, number::SUM)
        } else {
            Ok(())
        };
        done.wait();
        outcome
    });
    assert!(
        matches!(got[0], Err(Lost::Late { peer: 1, .. })),
        "{:?}",
        got[0]
    );
}

/// Who does not know the secret is not let in, and who does not come is named.
#[test]
fn who_does_not_come_is_named() {
    let timeout = Duration::from_millis(300);
    let mut mesh = Mesh::new(0, 2, timeout).expect("listens");
    let places = vec![(vec!["127.0.0.1".to_owned()], mesh.port()); 2];
    let mut stranger = Mesh::new(1, 2, timeout).expect("listens");
    let outcome = thread::scope(|scope| {
        let other = scope.spawn(|| stranger.connect(&places, "another"));
        let outcome = mesh.connect(&places, "secret").expect_err("nobody came");
        other.join().expect("no panic").expect_err("a stranger");
        outcome
    });
    assert!(
        outcome.to_string().contains("rank 1 did not connect"),
        "{outcome}"
    );
}
