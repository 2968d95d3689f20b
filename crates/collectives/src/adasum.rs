//! Adasum: a sum of gradients that does not overshoot where they point the same way.
//!
//! Two vectors a and b are combined as (1 - a.b / 2|a|^2) a + (1 - a.b / 2|b|^2) b; more than two by a
//! binary tree over the members (Maleki et al., "Scaling Distributed Training with Adaptive
//! Summation", 2020). Each member exchanges the whole vector with its partner of each level.

use crate::algorithms::Members;
use crate::mesh::Lost;
use crate::number;

/// A squared norm up to this says nothing about a direction.
const ZERO: f64 = 1e-300;

/// `data` becomes the combination of all members' vectors, whose number is a power of two.
///
/// # Errors
/// See [`Lost`].
pub fn adasum(members: &Members, data: &mut [u8], dtype: u8) -> Result<(), Lost> {
    let mut theirs = vec![0; data.len()];
    let mut distance = 1;
    while distance < members.ranks.len() {
        let partner = members.place ^ distance;
        members.swap(partner, data, &mut theirs)?;
        let (mut a, mut b) = (Vec::new(), Vec::new());
        number::widen(dtype, data, &mut a);
        number::widen(dtype, &theirs, &mut b);
        if partner < members.place {
            // The same order on both sides gives the same bits.
            std::mem::swap(&mut a, &mut b);
        }
        number::narrow(dtype, &combine(&a, &b), data);
        distance *= 2;
    }
    Ok(())
}

/// As the module's text says.
#[must_use]
pub fn combine(a: &[f64], b: &[f64]) -> Vec<f64> {
    let dot = |x: &[f64], y: &[f64]| -> f64 { x.iter().zip(y).map(|(x, y)| x * y).sum() };
    let (both, of_a, of_b) = (dot(a, b), dot(a, a), dot(b, b));
    let factor = |norm: f64| {
        if norm <= ZERO {
            1.0
        } else {
            1.0 - both / (2.0 * norm)
        }
    };
    let (fa, fb) = (factor(of_a), factor(of_b));
    a.iter().zip(b).map(|(a, b)| a * fa + b * fb).collect()
}
